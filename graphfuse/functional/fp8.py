"""RMSNorm stored as FP8, with a scale that is given or one for each row that is found on the way."""

from collections.abc import Callable

import torch

from graphfuse.enums import reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.function import function
from graphfuse.functional.norms import INPUT, RESIDUAL, WEIGHT, added, plain
from graphfuse.functional.tensor_parameter import FLOAT, FP8, TensorParameter, like, one, rows
from graphfuse.tensor import Tensor

SMALLEST = 512
"""A row's scale is never below 1 / (largest finite element * this), so that a row of zeros has one to divide by."""


def _static(draw: Callable[[Drawing], Tensor], *residual: TensorParameter) -> Variant:
    def quantize(d: Drawing) -> None:
        d.store("out", d.graph.mul(draw(d), d.graph.reciprocal(d["scale"])))

    out = TensorParameter("out", FP8, like("input"), written=True)
    return Variant((INPUT, *residual, WEIGHT, TensorParameter("scale", FLOAT, one), out), quantize)


def _dynamic(draw: Callable[[Drawing], Tensor], *residual: TensorParameter) -> Variant:
    def quantize(d: Drawing) -> None:
        g, y, largest = d.graph, draw(d), d.layouts["out"].stored.facts.max
        amax = g.reduction(y, mode=reduction_mode.AMAX).set_dim((*d.layouts["input"].shape[:-1], 1))
        scale = g.max(g.mul(amax, 1 / largest), 1 / (largest * SMALLEST))
        d.store("out", g.mul(y, g.reciprocal(scale)))
        d.store("scale", scale)

    out = TensorParameter("out", FP8, like("input"), written=True, new=torch.float8_e4m3fn)
    scale = TensorParameter("scale", FLOAT, rows("input"), written=True, new=torch.float32)
    return Variant((INPUT, *residual, WEIGHT, out, scale), quantize)


@function(_static(plain))
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
    (), on input's device (no number, which FlashInfer deprecates). The rest, and errors, as of ``rmsnorm``.
    Returns None.
    """


@function(_static(added, RESIDUAL))
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


@function(_dynamic(plain), "out", "scale")
def rmsnorm_quant_dynamic(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm as FP8 with a scale for each row (per token), by which a reader multiplies.

    With L the largest finite element (448 for float8_e4m3fn, 57344 for float8_e5m2) a row's scale is
    max(max|y| * (1 / L), 1 / (512 * L)) and its elements are y * (1 / scale), all in float32. FlashInfer has
    no such function.

    out: of input's shape, any strides; float8_e4m3fn (the default, newly allocated) or float8_e5m2. scale:
    float32, (..., 1), allocated if None. The rest, and errors, as of ``rmsnorm``. Returns (out, scale).
    """


@function(_dynamic(added, RESIDUAL), "out", "scale")
def fused_add_rmsnorm_quant_dynamic(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual becomes input + residual, as in ``fused_add_rmsnorm``, but input is only read; the norm of that sum
    is quantized as by ``rmsnorm_quant_dynamic``. Returns (out, scale).
    """
