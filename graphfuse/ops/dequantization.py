"""Dequantization in blocks: elements times the scale of their block."""

from collections.abc import Mapping, Sequence

from graphfuse.base import reordering
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule


def _sizes(x: Shape, scale: Shape, given: Sequence[int]) -> tuple[int, ...]:
    """Extent of a block along each axis. given: extents along the last axes, or one along the axis whose extent in
    `scale` fits."""
    if not 1 <= len(given) <= len(x) or any(size < 1 for size in given):
        raise GraphValidationError(
            f"block_size must be 1 to {len(x)} integers >= 1, those of input's last axes or one for the axis of "
            f"blocks, got {list(given)} (input {list(x)})"
        )
    tried = [(*(1,) * (len(x) - len(given)), *given)]
    if len(given) == 1:
        tried = [tuple(given[0] if a == axis else 1 for a in range(len(x))) for axis in reversed(range(len(x)))]
    for sizes in tried:
        exact = scales(x, sizes)
        if scale in (exact, reordering.whole_tiles(exact, _axis(sizes))):
            return sizes
    accepted = " or ".join(str(list(scales(x, sizes))) for sizes in tried)
    raise GraphValidationError(
        f"descale must have shape {accepted}, an element for each block of {list(given)} of input {list(x)}, got "
        f"{list(scale)}; reordered as F8_128x4 also that of whole tiles"
    )


def scales(x: Shape, sizes: Sequence[int]) -> Shape:
    """Shape of the scales of `x`, one element per block."""
    return tuple(-(-extent // size) for extent, size in zip(x, sizes, strict=True))


def _axis(sizes: Sequence[int]) -> int | None:
    """The axis that blocks run along; None if there are several or none."""
    along = [axis for axis, size in enumerate(sizes) if size != 1]
    return along[0] if len(along) == 1 else None


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, scale = shapes["input"], shapes["descale"]
    if len(scale) != len(x):
        raise GraphValidationError(f"descale must have the rank of input {list(x)}, got {list(scale)}")
    _sizes(x, scale, attributes["block_size"])
    return {"output": x}


def _frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes with the extent of a block along each axis, and the axis of blocks."""
    sizes = _sizes(inputs["input"], inputs["descale"], attributes["block_size"])
    return {"block_size": sizes, "axis": _axis(sizes)}


def dequantized(values, scale, sizes: Sequence[int]):
    """Values times the scale of their block. sizes: a block's extents."""
    for axis, size in enumerate(sizes):
        # Scales beyond the last block are padding of tiles.
        scale = scale.repeat_interleave(size, axis).narrow(axis, 0, values.shape[axis])
    return values * scale


TABLE = (
    Op(
        "block_scale_dequantize",
        "Dequantization in blocks: input * the element of descale for its block. block_size has a block's extent\n"
        "along each axis, or along the last ones: [1, 32] for rows of blocks, [32, 1] for columns of them, [128, 128]\n"
        "for tiles. One number is of the axis along which descale has an element a block. descale has input's extents\n"
        "divided by those of a block, rounded up; reordered as F8_128x4, for blocks along one axis, it may also have\n"
        "those of whole tiles: multiples of 4 along that axis and of 128 along the last other one. Any element goes\n"
        "with any scale: MXFP8 and MXFP4 have FP8_E8M0, NVFP4 has FP8_E4M3. The product is in the compute data type,\n"
        "FLOAT unless set, which holds that of an FP8 or FP4 element and a scale of one byte exactly, but for\n"
        "magnitudes below 2^-126 or above 2^127. A matmul of two such outputs is the block-scaled product.",
        inputs=(Port("input"), Port("descale", scales="axis")),
        outputs=(Port("output", dtype=data_type.FLOAT, label="OUT_0"),),
        infer=_shapes,
        frozen=_frozen,
        reference=lambda t, x, a: {"output": dequantized(x["input"], x["descale"], a["block_size"])},
        attributes=(
            Attribute("block_size", (int,), required=True, several=True),
            Attribute("is_negative_scale", (bool,), False),
        ),
        not_offered={"is_negative_scale": (False, "neg of the result: descale is read with the sign that it has")},
        vjp=NoRule("elements that were quantized in blocks, and their scales, have no gradient"),
    ),
)
