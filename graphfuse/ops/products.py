"""Sums of products: matrix products and convolutions."""

import itertools
import math
from collections.abc import Mapping

from graphfuse.base.enums import convolution_mode
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import layouts
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule, Pullback


def _matmul_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    a, b = shapes["A"], shapes["B"]
    if len(a) != len(b) or len(a) < 2:
        raise GraphValidationError(
            f"A and B must have one rank, 2 or more, [batch axes..., M, K] and [batch axes..., K, N], "
            f"got {list(a)} and {list(b)}"
        )
    if a[-1] != b[-2]:
        raise GraphValidationError(
            f"B must have as many rows as A has columns, {a[-1]}, got {b[-2]} (A {list(a)}, B {list(b)})"
        )
    for axis, (one, other) in enumerate(zip(a[:-2], b[:-2], strict=True)):
        if one != other and 1 not in (one, other):
            raise GraphValidationError(
                f"batch axis {axis} does not broadcast (equal extents or 1 are accepted): A {list(a)}, B {list(b)}"
            )
    batch = (other if one == 1 else one for one, other in zip(a[:-2], b[:-2], strict=True))
    return {"C": (*batch, a[-2], b[-1])}


def _matmul(t, x, a) -> dict[str, object]:
    return {"C": t.matmul(x["A"], x["B"])}


_RANKS = {4: "[N, C, H, W]", 5: "[N, C, D, H, W]"}


def _window(attributes: Attributes, axes: int) -> dict[str, tuple[int, ...]]:
    """Padding before and after, stride and dilation of each of so many spatial axes."""
    padding, before, after = (attributes[name] for name in ("padding", "pre_padding", "post_padding"))
    if padding is not None and (before, after) != (None, None):
        raise GraphValidationError("padding is given with pre_padding or post_padding; give it, or both of these")
    if (before is None) != (after is None):
        given, missing = ("pre_padding", "post_padding") if after is None else ("post_padding", "pre_padding")
        raise GraphValidationError(f"{given} is given without {missing}; give both, or padding")
    none = (0,) * axes if padding is None else padding
    found = {
        "pre_padding": none if before is None else before,
        "post_padding": none if after is None else after,
        "stride": (1,) * axes if attributes["stride"] is None else attributes["stride"],
        "dilation": (1,) * axes if attributes["dilation"] is None else attributes["dilation"],
    }
    for name, values in found.items():
        least = 0 if "padding" in name else 1
        if len(values) != axes or any(v < least for v in values):
            called = "padding" if padding is not None and "padding" in name else name
            raise GraphValidationError(
                f"{called} must be {axes} integers >= {least}, one for each spatial axis, got {list(values)}"
            )
    return found


def _conv_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, w = shapes["image"], shapes["weight"]
    if len(x) not in _RANKS or len(w) != len(x):
        raise GraphValidationError(
            f"image must be {' or '.join(_RANKS.values())} and weight [K, C / groups, as many spatial axes], "
            f"got {list(x)} and {list(w)}"
        )
    if not w[1] or x[1] % w[1]:
        raise GraphValidationError(
            f"image has {x[1]} channels, which must be a multiple of weight's {w[1]}: the quotient is the number of "
            f"groups (image {list(x)}, weight {list(w)})"
        )
    groups = x[1] // w[1]
    if not groups or w[0] % groups:
        raise GraphValidationError(
            f"weight makes {w[0]} channels, which must be a multiple of the {groups} groups, {x[1]} / {w[1]} channels"
        )
    spatial = []
    window = _window(attributes, len(x) - 2)
    for axis, (extent, taps, before, after, stride, dilation) in enumerate(
        zip(x[2:], w[2:], *window.values(), strict=True)
    ):
        reach, padded = dilation * (taps - 1) + 1, extent + before + after
        if not 1 <= taps or padded < reach:
            raise GraphValidationError(
                f"weight spans {reach if taps else 0} elements along axis {axis + 2}; accepted: 1 to the {padded} that "
                f"image has with padding (image {list(x)}, weight {list(w)})"
            )
        spatial.append((padded - reach) // stride + 1)
    return {"Y": (x[0], w[0], *spatial)}


def _conv_frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes with a number for each spatial axis."""
    window = _window(attributes, len(inputs["image"]) - 2)
    return {**window, "convolution_mode": attributes["convolution_mode"]}


def _conv(t, x, a) -> dict[str, object]:
    # One matrix product for each tap of the weight: sums are in the compute type whatever library torch has for
    # convolutions, and however that is set up.
    image, weight = x["image"], x["weight"]
    batch, channels, *extents = image.shape
    made, per_group, *taps = weight.shape
    groups = channels // per_group
    if a["convolution_mode"] is convolution_mode.CONVOLUTION:
        weight = weight.flip(*range(2, weight.dim()))
    sides = zip(a["pre_padding"], a["post_padding"], strict=True)
    padded = t.nn.functional.pad(image, [n for pair in reversed([*sides]) for n in pair])
    out = [
        (extent - dilation * (count - 1) - 1) // stride + 1
        for extent, count, stride, dilation in zip(padded.shape[2:], taps, a["stride"], a["dilation"], strict=True)
    ]
    weight = weight.reshape(groups, made // groups, per_group, *taps)
    total = image.new_zeros(batch, groups, made // groups, math.prod(out))
    for tap in itertools.product(*map(range, taps)):
        firsts = [at * dilation for at, dilation in zip(tap, a["dilation"], strict=True)]
        seen = padded[
            (
                ...,
                *(
                    slice(first, first + stride * (count - 1) + 1, stride)
                    for first, count, stride in zip(firsts, out, a["stride"], strict=True)
                ),
            )
        ]
        total += t.matmul(weight[(..., *tap)], seen.reshape(batch, groups, per_group, math.prod(out)))
    return {"Y": total.reshape(batch, made, *out)}


def _transposed(p: Pullback, port: str) -> object:
    *batch, rows, columns = range(len(p.dim_of(port)))
    return p.graph.transpose(p[port], permutation=(*batch, columns, rows))


_OF_MATMUL = {
    "A": lambda p: p.graph.matmul(p.whole("C"), _transposed(p, "B")),
    "B": lambda p: p.graph.matmul(_transposed(p, "A"), p.whole("C")),
}

_INTEGERS = {"types": (int,), "several": True}

TABLE = (
    Op(
        "matmul",
        "The matrix product C = A B of [batch axes..., M, K] and [batch axes..., K, N], of which one may have extent\n"
        "1 along a batch axis where the other has more. Strides say how A and B lie: either may be transposed.\n"
        "Inputs of any float type; products and sums are in the compute data type, FLOAT unless set, in an order\n"
        "that is not specified, and C is rounded once, to its own type. The reference engine's are torch.matmul's: on\n"
        "a GPU, of FLOAT inputs, as exact as torch.set_float32_matmul_precision says. C is row-major unless set.\n"
        "padding, which in cuDNN fills what ragged extents leave, must be 0.",
        inputs=(Port("A"), Port("B")),
        outputs=(Port("C"),),
        infer=_matmul_shapes,
        strides=layouts.row_major,
        reference=_matmul,
        not_offered=(("padding", 0.0),),
        vjp=_OF_MATMUL,
        recomputed=False,
    ),
    Op(
        "conv_fprop",
        "Convolution of image [N, C, H, W] or [N, C, D, H, W] with weight [K, C / groups, taps along each spatial\n"
        "axis]: the number of groups is the quotient of their channels. Strides say how they lie: channels-last is\n"
        "C with stride 1. padding, zeros on both sides of each spatial axis, or pre_padding and post_padding; stride\n"
        "and dilation; without them 0, 1 and 1. convolution_mode: CROSS_CORRELATION, as in neural networks, or\n"
        "CONVOLUTION, which turns the weight around. Products and sums are in the compute data type, FLOAT unless\n"
        "set, in an order that is not specified, and Y is rounded once, to its own type. Y has\n"
        "[N, K, (extent + padding - dilation (taps - 1) - 1) / stride + 1, ...], channels-last unless set.",
        inputs=(Port("image"), Port("weight")),
        outputs=(Port("Y"),),
        infer=_conv_shapes,
        strides=layouts.channels_last,
        frozen=_conv_frozen,
        reference=_conv,
        attributes=(
            Attribute("padding", **_INTEGERS),
            Attribute("pre_padding", **_INTEGERS),
            Attribute("post_padding", **_INTEGERS),
            Attribute("stride", **_INTEGERS),
            Attribute("dilation", **_INTEGERS),
            Attribute("convolution_mode", (convolution_mode,), convolution_mode.CROSS_CORRELATION),
        ),
        vjp=NoRule("conv_dgrad and conv_wgrad, which make the gradients of a convolution, are not offered"),
        recomputed=False,
    ),
)
