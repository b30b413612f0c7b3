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
        "Dequantization in blocks: each element of input times the element of descale for its block. block_size has a\n"
        "block's extent along each axis, or along the last ones: [1, 32] for blocks within rows, [32, 1] within\n"
        "columns, [128, 128] for tiles. A single number is the extent along the axis that descale's shape fits.\n"
        "descale has input's extents divided by those of a block, rounded up. Reordered as F8_128x4, for blocks along\n"
        "one axis, it may also have those of whole tiles: multiples of 4 along that axis and of 128 along the last\n"
        "other one. Types of elements and scales may be combined freely: MXFP8 and MXFP4 have FP8_E8M0 scales, NVFP4\n"
        "has FP8_E4M3. The product is in the compute data type, FLOAT unless set, which is exact for an FP8 or FP4\n"
        "element and an 8-bit scale, except for magnitudes below 2^-126 or above 2^127. A matmul of two such outputs\n"
        "is the block-scaled product.",
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
