"""RMSNorm quantized in blocks: NVFP4, MXFP4 and MXFP8."""

from collections.abc import Callable, Mapping

import torch

from graphfuse.base.dtypes import data_type
from graphfuse.functional import option
from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import INPUT, MAYBE_NORM_OUT, RESIDUAL, WEIGHT, norm_of_input, norm_of_sum, store_norm
from graphfuse.functional.tensor_parameter import (
    FLOAT,
    FP8,
    PAIRS,
    TensorParameter,
    blocks,
    like,
    one,
    swizzled,
    types,
)
from graphfuse.op_graph.tensor import Tensor

_GLOBAL_SCALE = TensorParameter("global_scale", FLOAT, one, optional=True)
_PAIRS = types(data_type.FP4_E2M1, as_bytes=True)
_ELEMENTS = {
    16: TensorParameter("y_fp4", _PAIRS, like("input"), written=True, new=PAIRS),
    32: TensorParameter("y_fp4", _PAIRS | FP8, like("input"), written=True, new=PAIRS),
}
_SCALES = {
    "e4m3": (types(data_type.FP8_E4M3, as_bytes=True), torch.float8_e4m3fn),
    "ue8m0": (types(data_type.FP8_E8M0, as_bytes=True), torch.uint8),  # FlashInfer's for E8M0
}
_FORMATS = {
    (16, None): (16, "e4m3"),
    (16, "e4m3"): (16, "e4m3"),
    (16, "ue8m0"): (16, "ue8m0"),
    (32, None): (32, "ue8m0"),
    (32, "ue8m0"): (32, "ue8m0"),
}
_FORMAT = ("block_size", "scale_format")


def _variant(
    build: Callable[[GraphBuilder], Tensor],
    size: int,
    format: str,
    tiles: Mapping[str, bool],
    before: tuple,
    after: tuple,
) -> Variant:
    def quantize(d: GraphBuilder) -> None:
        y = store_norm(d, build(d))
        if "global_scale" in d:
            y = d.graph.mul(y, d["global_scale"])
        elements = d.layouts["y_fp4"].stored
        for number, (name, in_tiles) in enumerate(tiles.items()):
            values, scales = d.graph.block_scale_quantize(y, block_size=size, axis=d.rank - 1)
            if number == 0:
                d.store("y_fp4", values)
            else:  # computes the same scales again; the elements are not read
                values.set_data_type(elements)
            d.store(name, scales, swizzled=in_tiles)

    shape = blocks("input", size)
    accepted, new = _SCALES[format]
    scales = (
        TensorParameter(name, accepted, swizzled(shape) if in_tiles else shape, written=True, new=new)
        for name, in_tiles in tiles.items()
    )
    return Variant((INPUT, *before, WEIGHT, _ELEMENTS[size], *scales, _GLOBAL_SCALE, *after), quantize)


# By the options after the format: arguments that receive the scales, and whether these are in tiles.
_ONE_LAYOUT = {(tiles,): {"block_scale": tiles} for tiles in (False, True)}
_BOTH_LAYOUTS = {(): {"block_scale": True, "block_scale_unswizzled": False}}


def _variants(
    build: Callable[[GraphBuilder], Tensor], layouts: Mapping[tuple, Mapping], before: tuple = (), after: tuple = ()
) -> Mapping[tuple, Variant]:
    made = {
        (format, key): _variant(build, *format, tiles, before, after)
        for format in set(_FORMATS.values())
        for key, tiles in layouts.items()
    }
    return {(*chosen, *key): made[format, key] for chosen, format in _FORMATS.items() for key in layouts}


@function(_variants(norm_of_input, _ONE_LAYOUT), "y_fp4", "block_scale", chosen_by=(*_FORMAT, "is_sf_swizzled_layout"))
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
    """RMSNorm(input, weight, eps) * global_scale in blocks along the last dimension, each with its own scale.

    y_fp4: float4_e2m1fn_x2 or uint8, (..., hidden / 2), two elements a byte, the even one low. block_scale: by
    scale_format "e4m3" float8_e4m3fn or uint8, by "ue8m0" uint8 or float8_e8m0fnu. Both are allocated if None, as
    the first of their types. hidden is a multiple of block_size.

    block_size 16: NVFP4 with scale_format "e4m3" or None; "ue8m0" has powers of two instead.
    block_size 32, scale_format "ue8m0" or None: MXFP4, or MXFP8 if y_fp4 is given with input's shape in float8_e4m3fn
    or float8_e5m2. How scales and elements are found: ``pygraph.block_scale_quantize``.

    global_scale: float32, (1,) or (), by which values are multiplied before their blocks are looked at (FlashInfer's
    documentation says divided; its kernels multiply, too).
    block_scale: (..., hidden / block_size), any strides; with is_sf_swizzled_layout the memory of whole tiles
    of 128 rows by 4 blocks instead, packed, in one dimension or as (rows, blocks) rounded up, in the order
    that block-scaled GEMMs read (``tensor_reordering.F8_128x4``); padding is not written.

    The rest, and errors, as in ``rmsnorm``. Returns (y_fp4, block_scale).
    """


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
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual becomes input + residual, as in ``fused_add_rmsnorm``, but input is only read; the norm of that sum
    is quantized as by ``rmsnorm_fp4quant``.

    y_out: receives the norm itself, before global_scale; of input's shape, bfloat16, float16 or float32.
    output_both_sf_layouts: block_scale receives the scales in tiles, regardless of is_sf_swizzled_layout, and
    block_scale_unswizzled receives them as (..., hidden / block_size), any strides, of block_scale's types; allocated
    if None. It is ignored without the option.

    Returns (y_fp4, block_scale), with output_both_sf_layouts (y_fp4, block_scale, block_scale_unswizzled).
    """
    if output_both_sf_layouts is False:
        tensors = input, residual, weight, y_fp4, block_scale, global_scale
        return _one_layout(*tensors, eps, block_size, scale_format, is_sf_swizzled_layout, enable_pdl, y_out)
    option.check({"output_both_sf_layouts": output_both_sf_layouts, "is_sf_swizzled_layout": is_sf_swizzled_layout})
    tensors = input, residual, weight, y_fp4, block_scale, global_scale
    return _two_layouts(*tensors, eps, block_size, scale_format, block_scale_unswizzled, enable_pdl, y_out)


# Two operators of torch, each with one number of results, and FlashInfer's one function.
_one_layout = function(
    _variants(norm_of_sum, _ONE_LAYOUT, (RESIDUAL,), (MAYBE_NORM_OUT,)),
    "y_fp4",
    "block_scale",
    chosen_by=(*_FORMAT, "is_sf_swizzled_layout"),
    without=("output_both_sf_layouts", "block_scale_unswizzled"),
)(add_rmsnorm_fp4quant)
_two_layouts = function(
    _variants(norm_of_sum, _BOTH_LAYOUTS, (RESIDUAL,), (MAYBE_NORM_OUT,)),
    "y_fp4",
    "block_scale",
    "block_scale_unswizzled",
    chosen_by=_FORMAT,
    name="add_rmsnorm_fp4quant_both_layouts",
    without=("is_sf_swizzled_layout", "output_both_sf_layouts"),
)(add_rmsnorm_fp4quant)
add_rmsnorm_fp4quant.problems = _one_layout.problems
