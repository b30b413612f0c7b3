"""FP8 quantization with a given scale, or with one computed per row or group of a row.

It quantizes norms, SiLU times a tensor, or a tensor itself.
"""

from collections.abc import Callable, Mapping

import torch

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import (
    INPUT,
    MAYBE_BIAS,
    MAYBE_NORM_OUT,
    MAYBE_WEIGHTS,
    RESIDUAL,
    WEIGHT,
    layer_norm_of_input,
    norm_of_input,
    norm_of_sum,
    store_norm,
)
from graphfuse.functional.tensor_parameter import FLOAT, FLOATS, FP8, Rule, TensorParameter, blocks, like, one, rows
from graphfuse.op_graph.tensor import Tensor

SMALLEST = 512
"""Factor in the smallest scale of a row, 1 / (largest finite element * SMALLEST): a row of zeros has a scale to divide
by."""
GROUP = 128
"""Elements of a group."""


def _static(build: Callable[[GraphBuilder], Tensor], *read: TensorParameter) -> Variant:
    def quantize(d: GraphBuilder) -> None:
        d.store("out", d.graph.mul(build(d), d.graph.reciprocal(d["scale"])))

    out = TensorParameter("out", FP8, like("input"), written=True)
    return Variant((INPUT, *read, TensorParameter("scale", FLOAT, one), out), quantize)


def _by_rows(d: GraphBuilder, y: Tensor) -> None:
    g, largest = d.graph, d.layouts["out"].stored.facts.max
    scale = g.max(g.mul(d.by_rows(y, reduction_mode.AMAX), 1 / largest), 1 / (largest * SMALLEST))
    d.store("out", g.mul(y, g.reciprocal(scale)))
    d.store("scale", scale)


def _by_groups(d: GraphBuilder, y: Tensor) -> None:
    values, scales = d.graph.block_scale_quantize(y, block_size=GROUP, axis=d.rank - 1)
    d.store("out", values)
    d.store("scale", scales)


def _dynamic(
    build: Callable[[GraphBuilder], Tensor], *read: TensorParameter, after: tuple[TensorParameter, ...] = ()
) -> Mapping[tuple, Variant]:
    """Variants by group_size."""
    first = read[0].name
    out = TensorParameter("out", FP8, like(first), written=True, new=torch.float8_e4m3fn)

    def variant(quantize: Callable[[GraphBuilder, Tensor], None], shape: Rule) -> Variant:
        scale = TensorParameter("scale", FLOAT, shape, written=True, new=torch.float32)
        return Variant((*read, out, scale, *after), lambda d: quantize(d, store_norm(d, build(d))))

    return {(None,): variant(_by_rows, rows(first)), (GROUP,): variant(_by_groups, blocks(first, GROUP))}


def _silu_mul(d: GraphBuilder) -> Tensor:
    return d.graph.mul(d.graph.swish(d["gate"]), d["up"])


_GATE = TensorParameter("gate", FLOATS)
_UP = TensorParameter("up", FLOATS, like("gate"))


@function(_static(norm_of_input, WEIGHT))
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """out becomes RMSNorm(input, weight, eps) * (1 / scale) as FP8, rounded once and saturating.

    out: of input's shape, any strides; its type selects float8_e4m3fn or float8_e5m2. scale: float32, (1,) or
    (), on input's device (no number, which FlashInfer deprecates). The rest, and errors, as in ``rmsnorm``.
    Returns None.
    """


@function(_static(norm_of_sum, RESIDUAL, WEIGHT))
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual becomes input + residual, and out becomes RMSNorm of that sum * (1 / scale) as FP8.

    The sum as in ``fused_add_rmsnorm``, but input is only read; out and scale as in ``rmsnorm_quant``.
    Returns None.
    """


@function(_static(layer_norm_of_input, MAYBE_WEIGHTS, MAYBE_BIAS))
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """out becomes ``layernorm(input, weight, bias, eps)`` * (1 / scale) as FP8, rounded once and saturating.

    out and scale as in ``rmsnorm_quant``. The rest, and errors, as in ``layernorm``. Returns None.
    """


@function(_dynamic(norm_of_input, INPUT, WEIGHT, after=(MAYBE_NORM_OUT,)), "out", "scale", chosen_by=("group_size",))
def rmsnorm_quant_dynamic(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    group_size: int | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm as FP8 with a scale for each row (per token), or each group of a row, by which a reader multiplies.

    With L the largest finite element (448 for float8_e4m3fn, 57344 for float8_e5m2) a row's scale is
    max(max|y| * (1 / L), 1 / (512 * L)) and its elements are y * (1 / scale), all in float32, elements rounded to
    nearest even and saturating. With group_size 128, each group of 128 consecutive elements of a row has its own scale
    (1x128, as in DeepSeek's models and DeepGEMM), and hidden is a multiple of 128:
    max(max|y| * (1 / L), 2^-126). FlashInfer has no such function.

    out: of input's shape, any strides; float8_e4m3fn (the default, newly allocated) or float8_e5m2. scale:
    float32, allocated if None, (..., 1) or (..., hidden / 128); of any strides, so that scales may be column-major with
    gaps, as GEMMs with TMA read them. If the distance of columns changes between calls, each number of rows is planned
    separately. In a slice of a larger tensor it is constant.
    y_out: receives the norm itself; of input's shape, bfloat16, float16 or float32.

    The rest, and errors, as in ``rmsnorm``. Returns (out, scale).
    """


@function(
    _dynamic(norm_of_sum, INPUT, RESIDUAL, WEIGHT, after=(MAYBE_NORM_OUT,)), "out", "scale", chosen_by=("group_size",)
)
def fused_add_rmsnorm_quant_dynamic(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    group_size: int | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual becomes input + residual, as in ``fused_add_rmsnorm``, but input is only read; the norm of that sum
    is quantized as by ``rmsnorm_quant_dynamic``. Returns (out, scale).
    """


@function(_dynamic(_silu_mul, _GATE, _UP), "out", "scale", chosen_by=("group_size",))
def silu_mul_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    group_size: int | None = None,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU(gate) * up as FP8, computed in float32, with a scale per row, or with group_size 128 per 128 consecutive
    elements, as in ``rmsnorm_quant_dynamic``.

    gate: (..., hidden), bfloat16, float16 or float32, any strides. up: of gate's shape, any of these types. If a
    product returns both in one tensor, use ``gate, up = x.chunk(2, -1)``. out, scale: as for ``rmsnorm_quant_dynamic``.
    FlashInfer has no such function. enable_pdl and errors as in ``rmsnorm``. Returns (out, scale).
    """


@function(_dynamic(lambda d: d["input"], INPUT), "out", "scale", chosen_by=("group_size",))
def quantize_fp8(
    input: torch.Tensor,  # noqa: A002
    group_size: int | None = GROUP,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """input as FP8 with a scale per 128 consecutive elements of a row, or with group_size None per row, as in
    ``rmsnorm_quant_dynamic``.

    input: (..., hidden), bfloat16, float16 or float32, any strides. out, scale: as for ``rmsnorm_quant_dynamic``.
    FlashInfer has no such function. enable_pdl and errors as in ``rmsnorm``. Returns (out, scale).
    """
