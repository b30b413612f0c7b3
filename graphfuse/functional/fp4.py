"""RMSNorm stored in blocks with a scale each: NVFP4, and MXFP8."""

from collections.abc import Callable, Mapping

import torch

from graphfuse.dtypes import data_type
from graphfuse.functional.argument import FLOAT, FLOATS, FP8, PAIRS, Argument, blocks, like, one, swizzled, types
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.function import function
from graphfuse.functional.norms import INPUT, RESIDUAL, WEIGHT, added, plain
from graphfuse.tensor import Tensor

_GLOBAL_SCALE = Argument("global_scale", FLOAT, one, optional=True)
_NORM = Argument("y_out", FLOATS, like("input"), written=True, optional=True)
_ELEMENTS = {
    16: Argument("y_fp4", types(data_type.FP4_E2M1, as_bytes=True), like("input"), written=True, new=PAIRS),
    32: Argument(
        "y_fp4",
        FP8,
        like("input"),
        written=True,
        note="block_size 32 is MXFP8 and selected by the type; MXFP4 is not supported",
    ),
}
_SCALES = {
    16: (types(data_type.FP8_E4M3, as_bytes=True), torch.float8_e4m3fn),
    32: (types(data_type.FP8_E8M0, as_bytes=True), torch.uint8),  # FlashInfer's for E8M0
}
_FORMATS = {(16, None): 16, (16, "e4m3"): 16, (32, None): 32, (32, "ue8m0"): 32}
_CHOSEN_BY = ("block_size", "scale_format", "is_sf_swizzled_layout")


def _variant(draw: Callable[[Drawing], Tensor], size: int, tiles: bool, before: tuple, after: tuple) -> Variant:
    def quantize(d: Drawing) -> None:
        y = draw(d)
        if "y_out" in d:
            d.store("y_out", d.graph.identity(y))  # an output that is read would be read as stored
        if "global_scale" in d:
            y = d.graph.mul(y, d["global_scale"])
        values, scales = d.graph.block_scale_quantize(y, block_size=size, axis=d.rank - 1)
        d.store("y_fp4", values)
        d.store("block_scale", scales, swizzled=tiles)

    shape = blocks("input", size)
    accepted, new = _SCALES[size]
    scale = Argument("block_scale", accepted, swizzled(shape) if tiles else shape, written=True, new=new)
    return Variant((INPUT, *before, WEIGHT, _ELEMENTS[size], scale, _GLOBAL_SCALE, *after), quantize)


def _variants(draw: Callable[[Drawing], Tensor], before: tuple = (), after: tuple = ()) -> Mapping[tuple, Variant]:
    made = {(size, tiles): _variant(draw, size, tiles, before, after) for size in (16, 32) for tiles in (False, True)}
    return {(*chosen, tiles): made[size, tiles] for chosen, size in _FORMATS.items() for tiles in (False, True)}


@function(_variants(plain), "y_fp4", "block_scale", chosen_by=_CHOSEN_BY)
def rmsnorm_fp4quant(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm(input, weight, eps) * global_scale in blocks along the last dimension, each with a scale of its own.

    block_size 16, scale_format None or "e4m3": NVFP4. y_fp4: float4_e2m1fn_x2 or uint8, (..., hidden / 2), two
    elements a byte, the even one low; block_scale: float8_e4m3fn or uint8. Both are allocated if None.
    block_size 32, scale_format None or "ue8m0": MXFP8, not FlashInfer's MXFP4, which is refused. y_fp4 must be
    given: float8_e4m3fn or float8_e5m2, of input's shape; block_scale: uint8 (allocated if None) or
    float8_e8m0fnu. hidden is a multiple of block_size. How scales and elements are found:
    ``pygraph.block_scale_quantize``.

    global_scale: float32, (1,) or (), by which values are multiplied before their blocks are looked at (FlashInfer's
    documentation says divided; its kernels multiply, too).
    block_scale: (..., hidden / block_size), any strides; with is_sf_swizzled_layout the memory of whole tiles
    of 128 rows by 4 blocks instead, packed, in one dimension or as (rows, blocks) rounded up, in the order
    that block-scaled GEMMs read (``tensor_reordering.F8_128x4``); padding is not written.

    The rest, and errors, as of ``rmsnorm``. Returns (y_fp4, block_scale).
    """


@function(_variants(added, (RESIDUAL,), (_NORM,)), "y_fp4", "block_scale", chosen_by=_CHOSEN_BY)
def add_rmsnorm_fp4quant(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual becomes input + residual, as in ``fused_add_rmsnorm``, but input is only read; the norm of that sum
    is quantized as by ``rmsnorm_fp4quant``.

    y_out: gets the norm itself, before global_scale; of input's shape, bfloat16, float16 or float32.
    output_both_sf_layouts and block_scale_unswizzled: scales are written in one layout; only False and None
    are accepted. Returns (y_fp4, block_scale).
    """
