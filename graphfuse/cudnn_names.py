"""Names of cuDNN's frontend (1.32) that are not here, each with what to use instead. Data, and the error that says it.

A name that is offered one day leaves its table; a test asks.
"""

import enum
from collections.abc import Mapping
from typing import NoReturn

from graphfuse.errors import NotOfferedError

_CACHED = "kernels are cached in memory and on disk by their text, which holds no row count: leave it out"
_DEVICELESS = "give the device as a handle: pygraph(handle=create_handle(DEVICE))"
_CAPTURE = "capture execute in a CUDA graph, with torch.cuda.graph or the driver: it allocates nothing"
_KNOBS = "knobs are a dict by name, see get_engine_and_knobs_at_index"
_INSPECT = "graph.explanation() has nodes, tensors and regions as data, print(graph) the graph as Python"
_RAGGED = "give tensors without padding, rows one after another: row counts need no new kernel"
_POINTWISE = "write it in the operations that README lists"
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention; graphfuse.functional.qk_rmsnorm norms queries and keys"
_RECURRENCE = "there are no recurrences over a sequence; norms and gates around one are graphs of their own"
_RECURRENCES = tuple(
    f"{name}{step}"
    for name in ("gdn", "gdn2", "gdp", "kda", "mamba2")
    for step in ("", "_bwd", "_summary", "_summary_bwd")
)
_NORM = "write it with reduction, sub, mul and rsqrt: reductions along one set of axes become one kernel"
_MATMUL = "torch.matmul, and the operations around it as a graph of their own"
_CONVOLUTION = "torch.nn.functional.conv2d or conv3d, and the operations around it as a graph of their own"
_VIEW = "declare tensors with the dims and strides of the view"
_ENUM = "no operation here takes it"

MODULE: Mapping[str, str] = {
    "DeviceInfo": "Handle.device has what is known of a device",
    "FRONTEND_KNOB_TYPE_BASE": _KNOBS,
    "GraphContext": "pygraph's constructor takes the data types",
    "Node": _INSPECT,
    "NodeType": _INSPECT,
    "attention_implementation": _ENUM,
    "create_device_properties": _DEVICELESS,
    "create_kernel_cache": _CACHED,
    "cuda_graph_retention": _CAPTURE,
    "datatypes": "data types may be given as torch's or numpy's",
    "experimental": "graphfuse.functional and graphfuse.torch have functions ready to call",
    "get_last_error_string": "errors are exceptions, GraphfuseError, whose messages say it all",
    "handle": "its type is graphfuse.Handle",
    "is_frontend_knob_type": _KNOBS,
    "jax": "arrays of JAX can be given to execute by DLPack",
    "knob": _KNOBS,
    "knob_type": _KNOBS,
    "moe_grouped_matmul_mode": _ENUM,
    "reshape_mode": _ENUM,
    "scalar_type": "tensor_scalar makes a constant, tensor(is_pass_by_value=True) what execute is given",
    "sdpa_capabilities": _ATTENTION,
}

PYGRAPH: Mapping[str, str] = {
    **dict.fromkeys(("add_square", "logical_and", "logical_not", "logical_or"), _POINTWISE),
    **dict.fromkeys(("ceil", "cos", "erf", "floor", "mod", "pow", "sin", "tan"), _POINTWISE),
    **dict.fromkeys(("elu", "elu_backward"), _POINTWISE),
    **dict.fromkeys(("softplus", "softplus_backward"), _POINTWISE),
    "genstats": _NORM,
    **dict.fromkeys(("moe_grouped_matmul", "moe_grouped_matmul_bwd"), _MATMUL),
    **dict.fromkeys(("conv_dgrad", "conv_wgrad"), _CONVOLUTION),
    **dict.fromkeys(("sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward"), _ATTENTION),
    **dict.fromkeys(("sdpa_mxfp8", "sdpa_mxfp8_backward"), _ATTENTION),
    **dict.fromkeys(("scaled_dot_product_flash_attention", "scaled_dot_product_flash_attention_backward"), _ATTENTION),
    **dict.fromkeys(_RECURRENCES, _RECURRENCE),
    "reshape": _VIEW,
    "concatenate": "join joins two tensors along an axis; outputs may be slices of one tensor",
    "rope": "rotate_pairs, which takes cosines and sines; graphfuse.functional.qk_norm_rope norms, too",
    "rope_backward": "rotate_pairs(inverse=True)",
    "block_scale_dequantize": "mul by the scales, in torch",
    "backend_plan_entries": "get_execution_plan_count and get_plan_name_at_index: all plans are in one list",
    "plans": "get_execution_plan_count and get_plan_name_at_index",
    "select_plan": "build_plan_at_index builds a plan and selects it",
    "selected_engine": "explanation().regions tells the engine of each region",
    "context": "the constructor takes the data types",
    "find_tensor": "query_tensor_attributes_of_uid; execute takes names, too",
    "get_node": _INSPECT,
    "get_inputs": _INSPECT,
    "get_outputs": _INSPECT,
    "inspect": _INSPECT,
    "get_cuda_graph_retention": _CAPTURE,
}

TENSOR: Mapping[str, str] = {
    "get_alignment": "get_byte_alignment",
    "set_alignment": "set_byte_alignment",
    "set_alignment_value": "set_byte_alignment",
    "get_has_compile_time_constant": "tensor.value is None for what is no constant",
    "get_ragged_offset_multiplier": _RAGGED,
    "set_ragged_offset": _RAGGED,
    "set_ragged_offset_multiplier": _RAGGED,
    "get_vector_count": "there are no vectorized layouts; strides say where elements are",
    "get_vector_dimension": "there are no vectorized layouts; strides say where elements are",
    "set_vector_count_and_dimension": "there are no vectorized layouts; strides say where elements are",
    "validate": "graph.validate checks all tensors",
}

_VECTORS = "there are no vectorized or reordered layouts of integers"

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "data_type": {
        "FAST_FLOAT_FOR_FP8": "FLOAT",
        "FP8_E5M3": "FP8_E4M3, FP8_E5M2 or FP8_E8M0",
        "INT4": "INT8",
        "INT8x32": f"INT8; {_VECTORS}",
        "INT8x4": f"INT8; {_VECTORS}",
        "UINT8x4": f"UINT8; {_VECTORS}",
    },
    "reduction_mode": {"NOT_SET": "name the mode"},
    "tensor_reordering": {"F16x16": "NONE", "INT8x32": f"NONE; {_VECTORS}"},
}
"""Members of enumerations, by the enumeration's name."""

KEYWORDS: Mapping[str, str] = {
    "sm_count": "kernels are planned for the whole device: leave it out",
    "sm_version": _DEVICELESS,
    "kernel_cache": _CACHED,
    "device_property": _DEVICELESS,
    "cuda_graph_retention": _CAPTURE,
}
"""Arguments of pygraph's constructor that are accepted where they ask for nothing."""


class Members(enum.EnumMeta):
    """The type of enumerations of cuDNN's, whose other members answer with what to use instead."""

    def __getattr__(cls, name: str) -> object:
        known = getattr(enum.EnumMeta, "__getattr__", None)  # until Python 3.11 it finds the members
        if known is not None:
            try:
                return known(cls, name)
            except AttributeError:
                pass
        refuse(cls.__name__, name, MEMBERS.get(cls.__name__, {}), cls)


def refuse(where: str, name: str, instead: Mapping[str, str], owner: object) -> NoReturn:
    """The error for an attribute that is not there: a typed one with the hint if cuDNN has it."""
    if name in instead:
        raise NotOfferedError(f"{where} has no {name!r}, which cuDNN's frontend has; instead: {instead[name]}")
    raise AttributeError(f"{where} has no attribute {name!r}", name=name, obj=owner)
