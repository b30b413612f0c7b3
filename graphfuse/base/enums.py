"""The enumerations of the public API, with cuDNN's names."""

import enum

from graphfuse.base.cudnn_names import Members


class _Named(enum.Enum, metaclass=Members):
    def __repr__(self) -> str:
        return str(self)


class heur_mode(_Named):  # noqa: N801 - cuDNN's spelling
    """Mode of the heuristics: which engines propose plans, and how these are ranked."""

    OPENSOURCE = "opensource"  # generated kernels only
    A = "a"  # generated kernels first, then other engines for the rest
    B = "b"  # as A, with a longer list of knobs from each engine
    FALLBACK = "fallback"  # libraries' engines, and the reference engine, which runs every valid graph


class behavior_note(_Named):  # noqa: N801
    """Behaviour of a plan that may matter to callers; ``select_behavior_notes`` filters plans by it."""

    RUNTIME_COMPILATION = "runtime_compilation"
    REQUIRES_FILTER_INT8x32_REORDER = "requires_filter_int8x32_reorder"
    REQUIRES_BIAS_INT8x32_REORDER = "requires_bias_int8x32_reorder"
    SUPPORTS_CUDA_GRAPH_NATIVE_API = "supports_cuda_graph_native_api"
    CUBLASLT_DEPENDENCY = "cublaslt_dependency"


class numerical_note(_Named):  # noqa: N801
    """Property of a plan that affects its results; ``select_numeric_notes`` filters plans by it."""

    TENSOR_CORE = "tensor_core"
    DOWN_CONVERT_INPUTS = "down_convert_inputs"
    REDUCED_PRECISION_REDUCTION = "reduced_precision_reduction"
    FFT = "fft"
    NONDETERMINISTIC = "nondeterministic"
    WINOGRAD = "winograd"
    WINOGRAD_TILE_4x4 = "winograd_tile_4x4"
    WINOGRAD_TILE_6x6 = "winograd_tile_6x6"
    WINOGRAD_TILE_13x13 = "winograd_tile_13x13"
    STRICT_NAN_PROP = "strict_nan_prop"


class build_plan_policy(_Named):  # noqa: N801
    """HEURISTICS_CHOICE builds the first plan that works, ALL builds every plan that does."""

    HEURISTICS_CHOICE = "heuristics_choice"
    ALL = "all"


class norm_forward_phase(_Named):  # noqa: N801
    """INFERENCE writes the normalized tensor; TRAINING also the inverse RMS of each row."""

    NOT_SET = "not_set"
    INFERENCE = "inference"
    TRAINING = "training"


class tensor_reordering(_Named):  # noqa: N801
    """Order of a tensor's elements in memory: NONE, as dim and stride say."""

    NONE = "none"
    F8_128x4 = "f8_128x4"  # of block scales, see graphfuse/base/reordering.py


class reshape_mode(_Named):  # noqa: N801
    """Order in which ``reshape`` keeps the elements."""

    LOGICAL = "logical"  # row-major order of indices, whatever the strides
    VIEW_ONLY = "view_only"  # order in memory


class reduction_mode(_Named):  # noqa: N801
    """Operation with which ``reduction`` combines elements."""

    ADD = "add"
    MUL = "mul"
    MIN = "min"
    MAX = "max"
    AMAX = "amax"  # maximum of magnitudes
    AVG = "avg"
    NORM1 = "norm1"
    NORM2 = "norm2"
    MUL_NO_ZEROS = "mul_no_zeros"


class moe_grouped_matmul_mode(_Named):  # noqa: N801
    """Row indexing of ``moe_grouped_matmul``: which rows it reads, and where it writes them."""

    NONE = "none"
    GATHER = "gather"
    SCATTER = "scatter"
    COMBINE = "combine"


class convolution_mode(_Named):  # noqa: N801
    """Orientation of the weight in ``conv_fprop``: as given (CROSS_CORRELATION) or flipped (CONVOLUTION)."""

    CONVOLUTION = "convolution"
    CROSS_CORRELATION = "cross_correlation"


class diagonal_alignment(_Named):  # noqa: N801
    """Alignment of the diagonal of ``sdpa``: it starts at the first row and column, or ends at the last ones."""

    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


class attention_implementation(_Named):  # noqa: N801
    """Implementation of ``sdpa`` that the cuDNN engine requests from cuDNN."""

    AUTO = "auto"  # cuDNN's own choice
    COMPOSITE = "composite"  # products and softmax, as separate nodes
    UNIFIED = "unified"  # one node
