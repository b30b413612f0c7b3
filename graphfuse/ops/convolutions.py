"""Convolutions, and their gradients with respect to image and weight.

The references are one matrix product for each tap of the weight. So sums are in the compute type, whatever library
torch uses for convolutions, and whatever its settings.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from graphfuse.base.enums import convolution_mode
from graphfuse.base.errors import GraphValidationError
from graphfuse.base.wording import counted
from graphfuse.ops import layouts
from graphfuse.ops.moves import with_dim
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.products import multiplied
from graphfuse.ops.pullback import Pullback

_RANKS = {4: "[N, C, H, W]", 5: "[N, C, D, H, W]"}


def _window(attributes: Attributes, axes: int) -> dict[str, tuple[int, ...]]:
    """Padding before and after, stride and dilation of each spatial axis. axes: number of spatial axes."""
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
                f"{called} must be {counted(axes, 'integer')} >= {least}, one for each spatial axis, got {list(values)}"
            )
    return found


def _convolved(x: Shape, w: Shape, attributes: Attributes, image: str = "image", weight: str = "weight") -> Shape:
    """Shape of the convolution of x with w. image, weight: their names in errors."""
    if len(x) not in _RANKS or len(w) != len(x):
        raise GraphValidationError(
            f"{image} must be {' or '.join(_RANKS.values())} and {weight} [K, C / groups, as many spatial axes], "
            f"got {list(x)} and {list(w)}"
        )
    if not w[1] or x[1] % w[1]:
        raise GraphValidationError(
            f"{image} has {x[1]} channels, which must be a multiple of {weight}'s {w[1]}: the quotient is the number "
            f"of groups ({image} {list(x)}, {weight} {list(w)})"
        )
    groups = x[1] // w[1]
    if not groups or w[0] % groups:
        raise GraphValidationError(
            f"{weight} makes {w[0]} channels, which must be a multiple of the {groups} groups, {x[1]} / {w[1]} channels"
        )
    spatial = []
    window = _window(attributes, len(x) - 2)
    for axis, (extent, taps, before, after, stride, dilation) in enumerate(
        zip(x[2:], w[2:], *window.values(), strict=True)
    ):
        reach, padded = dilation * (taps - 1) + 1, extent + before + after
        if not 1 <= taps or padded < reach:
            raise GraphValidationError(
                f"{weight} spans {counted(reach if taps else 0, 'element')} along axis {axis + 2}; accepted: 1 to the "
                f"{padded} that {image} has with padding ({image} {list(x)}, {weight} {list(w)})"
            )
        spatial.append((padded - reach) // stride + 1)
    return (x[0], w[0], *spatial)


def _dgrad_shapes(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    dx, w = _required_shape(wanted, "DX", "image"), shapes["filter"]
    _check_loss(shapes["loss"], _convolved(dx, w, attributes, "DX", "filter"), f"DX {list(dx)}, filter {list(w)}")
    return {"DX": dx}


def _wgrad_shapes(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    dw, x = _required_shape(wanted, "DW", "weight"), shapes["image"]
    _check_loss(shapes["loss"], _convolved(x, dw, attributes, "image", "DW"), f"image {list(x)}, DW {list(dw)}")
    return {"DW": dw}


def _required_shape(wanted: Mapping[str, Shape], port: str, of: str) -> Shape:
    if port not in wanted:
        raise GraphValidationError(
            f"{port} has no dim, and {of}s of several shapes fit the others: call set_dim on it with {of}'s"
        )
    return wanted[port]


def _check_loss(loss: Shape, made: Shape, of: str) -> None:
    if loss != made:
        raise GraphValidationError(
            f"loss must have the shape of the convolution's result, {list(made)}, got {list(loss)} ({of})"
        )


def _frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes in canonical form, with a number for each spatial axis."""
    ((dim, _),) = outputs.values()
    return {**_window(attributes, len(dim) - 2), "convolution_mode": attributes["convolution_mode"]}


def _with_dim(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    return with_dim(_frozen(attributes, inputs, outputs), inputs, outputs)


def _padded(t, image, a: Attributes):
    sides = zip(a["pre_padding"], a["post_padding"], strict=True)
    return t.nn.functional.pad(image, [n for pair in reversed([*sides]) for n in pair])


def _flipped(values, a: Attributes):
    """Values by tap, flipped in mode CONVOLUTION."""
    flipped = a["convolution_mode"] is convolution_mode.CONVOLUTION
    return values.flip(*range(2, values.dim())) if flipped else values


def _tap_indices(taps: Sequence[int], made: Sequence[int], a: Attributes) -> Iterator[tuple[tuple, tuple]]:
    """(index of a tap, index of the elements of the padded image that it is multiplied with) for each tap.

    made: spatial extents of the result."""
    for tap in itertools.product(*map(range, taps)):
        firsts = [at * dilation for at, dilation in zip(tap, a["dilation"], strict=True)]
        covered = [
            slice(first, first + stride * (count - 1) + 1, stride)
            for first, count, stride in zip(firsts, made, a["stride"], strict=True)
        ]
        yield (..., *tap), (..., *covered)


def _grouped(values, groups: int):
    """A weight or its gradient, with the first axis split into groups."""
    return values.reshape(groups, values.shape[0] // groups, *values.shape[1:])


def _fprop(t, x, a) -> dict[str, object]:
    image, weight = x["image"], x["weight"]
    batch, channels = image.shape[:2]
    made, per_group, *taps = weight.shape
    groups, padded = channels // per_group, _padded(t, image, a)
    out = [
        (extent - dilation * (count - 1) - 1) // stride + 1
        for extent, count, stride, dilation in zip(padded.shape[2:], taps, a["stride"], a["dilation"], strict=True)
    ]
    weight, count = _grouped(_flipped(weight, a), groups), math.prod(out)
    total = image.new_zeros(batch, groups, made // groups, count)
    for tap, covered in _tap_indices(taps, out, a):
        total += multiplied(t, weight[tap], padded[covered].reshape(batch, groups, per_group, count))
    return {"Y": total.reshape(batch, made, *out)}


def _dgrad(t, x, a) -> dict[str, object]:
    loss, weight = x["loss"], x["filter"]
    batch, channels, *extents = a["dim"]
    per_group, taps, out = weight.shape[1], weight.shape[2:], loss.shape[2:]
    groups = channels // per_group
    weight = _grouped(_flipped(weight, a), groups)
    loss = loss.reshape(batch, groups, -1, math.prod(out)) if loss.numel() else loss
    before = a["pre_padding"]
    wide = [sum(sides) for sides in zip(before, extents, a["post_padding"], strict=True)]
    padded = loss.new_zeros(batch, groups, per_group, *wide)
    for tap, covered in _tap_indices(taps, out, a) if loss.numel() else ():
        made = t.matmul(weight[tap].transpose(1, 2), loss)
        padded[covered] += made.reshape(batch, groups, per_group, *out)
    inner = [slice(first, first + extent) for first, extent in zip(before, extents, strict=True)]
    return {"DX": padded[(..., *inner)].reshape(a["dim"])}


def _wgrad(t, x, a) -> dict[str, object]:
    image, loss = x["image"], x["loss"]
    made, per_group, *taps = a["dim"]
    out, groups = loss.shape[2:], image.shape[1] // per_group
    count = loss.shape[0] * math.prod(out)
    padded = _padded(t, image, a)
    loss = loss.transpose(0, 1).reshape(groups, made // groups, count)
    total = loss.new_zeros(groups, made // groups, per_group, *taps)
    for tap, covered in _tap_indices(taps, out, a):
        rows = padded[covered].transpose(0, 1).reshape(groups, per_group, count)
        total[tap] = t.matmul(loss, rows.transpose(1, 2))
    return {"DW": _flipped(total.reshape(a["dim"]), a)}


# A convolution is linear in image and weight, so the gradients of its gradients are convolutions, too.


def _to_image(p: Pullback, loss: object, weight: object, port: str) -> object:
    return p.graph.conv_dgrad(loss, weight, **p.attributes).set_dim(p.dim_of(port))


def _to_weight(p: Pullback, image: object, loss: object, port: str) -> object:
    return p.graph.conv_wgrad(image, loss, **p.attributes).set_dim(p.dim_of(port))


_INTEGERS = {"types": (int,), "several": True}
_WINDOW = (
    Attribute("padding", **_INTEGERS),
    Attribute("pre_padding", **_INTEGERS),
    Attribute("post_padding", **_INTEGERS),
    Attribute("stride", **_INTEGERS),
    Attribute("dilation", **_INTEGERS),
    Attribute("convolution_mode", (convolution_mode,), convolution_mode.CROSS_CORRELATION),
)
_GRADIENT = (
    "from loss, that of its result. Window and channels are conv_fprop's, with the same defaults. Products and sums\n"
    "are in the compute data type, FLOAT unless set, in an order that is not specified, and "
)

_convolution = partial(Op, strides=layouts.channels_last, attributes=_WINDOW, may_recompute=False)

TABLE = (
    _convolution(
        "conv_fprop",
        "Convolution of image [N, C, H, W] or [N, C, D, H, W] with weight [K, C / groups, taps along each spatial\n"
        "axis]: the number of groups is the quotient of their channels. Strides give the layouts: channels-last is\n"
        "C with stride 1. padding, zeros on both sides of each spatial axis, or pre_padding and post_padding; stride\n"
        "and dilation; the defaults are 0, 1 and 1. convolution_mode: CROSS_CORRELATION, as in neural networks, or\n"
        "CONVOLUTION, which flips the weight. A virtual input is read in the type that it declares. Products\n"
        "and sums are in the compute data type, FLOAT unless set, in an order that is not specified, and Y is rounded\n"
        "once, to its own type. In INT32 they are exact, modulo 2^32. Y has\n"
        "[N, K, (extent + padding - dilation (taps - 1) - 1) / stride + 1, ...], channels-last unless set.",
        inputs=(Port("image", declared=True), Port("weight", declared=True)),
        outputs=(Port("Y"),),
        infer=lambda shapes, attributes, _: {"Y": _convolved(shapes["image"], shapes["weight"], attributes)},
        frozen=_frozen,
        reference=_fprop,
        vjp={
            "image": lambda p: _to_image(p, p.whole("Y"), p["weight"], "image"),
            "weight": lambda p: _to_weight(p, p["image"], p.whole("Y"), "weight"),
        },
        integers=True,
    ),
    _convolution(
        "conv_dgrad",
        "Gradient of conv_fprop with respect to image, " + _GRADIENT + "DX is\n"
        "rounded once, to its own type. Its shape must be set by set_dim, because several shapes fit that of loss. DX\n"
        "is channels-last unless set.",
        inputs=(Port("loss", declared=True), Port("filter", declared=True)),
        outputs=(Port("DX"),),
        infer=_dgrad_shapes,
        frozen=_with_dim,
        reference=_dgrad,
        vjp={
            "loss": lambda p: p.graph.conv_fprop(p.whole("DX"), p["filter"], **p.attributes),
            "filter": lambda p: _to_weight(p, p.whole("DX"), p["loss"], "filter"),
        },
    ),
    _convolution(
        "conv_wgrad",
        "Gradient of conv_fprop with respect to weight, " + _GRADIENT + "DW is\n"
        "rounded once, to its own type. Its shape, with taps and channels of the weight, must be set by set_dim. DW\n"
        "is channels-last unless set.",
        inputs=(Port("image", declared=True), Port("loss", declared=True)),
        outputs=(Port("DW"),),
        infer=_wgrad_shapes,
        frozen=_with_dim,
        reference=_wgrad,
        vjp={
            "image": lambda p: _to_image(p, p["loss"], p.whole("DW"), "image"),
            "loss": lambda p: p.graph.conv_fprop(p["image"], p.whole("DW"), **p.attributes),
        },
    ),
)
