"""Shape rules: shapes of an op's outputs, absent outputs, and the types that outputs are stored in."""

from collections.abc import Iterable, Mapping
from functools import partial

from graphfuse.base import reordering
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.blocks import BLOCKS
from graphfuse.ops.op import Attributes, Shape


def broadcast(shapes: Mapping[str, Shape], *_) -> dict[str, Shape]:
    ranks = {len(s) for s in shapes.values()}
    if len(ranks) > 1:
        raise GraphValidationError(f"inputs must have one rank, got {dict(shapes)}")
    out = []
    for axis, extents in enumerate(zip(*shapes.values(), strict=True)):
        sizes = set(extents) - {1}
        if len(sizes) > 1:
            raise GraphValidationError(
                f"dimension {axis} does not broadcast (equal extents or 1 are accepted), got {dict(shapes)}"
            )
        out.append(sizes.pop() if sizes else 1)
    return {"output": tuple(out)}


def along_last(shapes: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    """The last axis of input, for rows that run along it."""
    return (len(shapes["input"]) - 1,)


def aligned(shape: Shape, rank: int) -> Shape:
    """`shape` with leading extents of 1 up to a rank."""
    return (*(1,) * (rank - len(shape)), *shape)


def rmsnorm_axes(x: Shape, scale: Shape | None) -> tuple[int, ...]:
    """The axes normalized over: those along which the scale varies; without a scale, the last."""
    if scale is None:
        return (len(x) - 1,)
    return tuple(axis for axis, extent in enumerate(aligned(scale, len(x))) if extent != 1)


def adalayernorm_axes(x: Shape, scale: Shape) -> tuple[int, ...]:
    """The axes normalized over: those along which the scale varies, except the first, that of samples."""
    return tuple(axis for axis in rmsnorm_axes(x, scale) if axis)


def _normalized_axes(x: Shape, scale: Shape | None) -> tuple[int, ...]:
    if scale is not None:
        extents = aligned(scale, len(x))
        if len(extents) != len(x) or any(s not in (1, e) for s, e in zip(extents, x, strict=True)):
            raise GraphValidationError(
                f"scale must have the rank of input {list(x)}, or a lower one for input's last axes, with each extent "
                f"1 or input's, got {list(scale)}"
            )
    return with_elements(x, rmsnorm_axes(x, scale))


def with_elements(x: Shape, axes: tuple[int, ...]) -> tuple[int, ...]:
    """`axes`. Raises GraphValidationError if an extent along them is 0."""
    if any(x[axis] == 0 for axis in axes):
        raise GraphValidationError(f"input {list(x)} has no elements along a normalized axis; at least 1 is needed")
    return axes


def check_scalars(shapes: Mapping[str, Shape], ports: Iterable[str], more: str = "") -> None:
    """Raises GraphValidationError if one of the ports has more than one element."""
    for port in ports:
        if any(e != 1 for e in shapes.get(port, ())):
            raise GraphValidationError(f"{port} must have one element, got shape {list(shapes[port])}{more}")


RMSNORM_ORDER = "by position: input, scale, epsilon, bias, norm_forward_phase (cuDNN's order differs: give keywords)"
LAYERNORM_ORDER = "by position: input, scale, bias, epsilon, norm_forward_phase (cuDNN's order differs: give keywords)"


def _norm(shapes: Mapping[str, Shape], attributes: Attributes, _, order: str) -> dict[str, Shape]:
    x, scale = shapes["input"], shapes.get("scale")
    axes = _normalized_axes(x, scale)
    row = tuple(e if axis in axes else 1 for axis, e in enumerate(x))
    if "bias" in shapes and aligned(shapes["bias"], len(x)) != row:
        whose = "the last axis' shape" if scale is None else "scale's shape"
        raise GraphValidationError(
            f"bias must have {whose} {list(row)}, leading extents of 1 aside, got {list(shapes['bias'])}"
        )
    _check_forward(shapes, attributes, order)
    return {"Y": x} | dict.fromkeys(("mean", "inv_variance"), one_per_row(x, axes))


def _check_forward(shapes: Mapping[str, Shape], attributes: Attributes, order: str) -> None:
    check_scalars(shapes, ("epsilon",), f"; {order}")
    check_phase(attributes)


def check_phase(attributes: Attributes) -> None:
    if attributes["norm_forward_phase"] is norm_forward_phase.NOT_SET:
        raise GraphValidationError("norm_forward_phase is NOT_SET; accepted: INFERENCE, TRAINING")


rmsnorm = partial(_norm, order=RMSNORM_ORDER)
layernorm = partial(_norm, order=LAYERNORM_ORDER)


def one_per_row(x: Shape, axes: tuple[int, ...]) -> Shape:
    """Shape of statistics of `x` over some axes."""
    return tuple(1 if axis in axes else e for axis, e in enumerate(x))


def norm_absent(attributes: Attributes, inputs: frozenset[str]) -> frozenset[str]:
    training = attributes["norm_forward_phase"] is norm_forward_phase.TRAINING
    return frozenset() if training else frozenset({"mean", "inv_variance"})


def rmsnorm_backward(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    scale = shapes.get("scale")
    out = _gradients(shapes, _normalized_axes(shapes["input"], scale), "inv_variance")
    if scale is None and attributes["has_dbias"]:
        raise GraphValidationError("has_dbias=True without a scale; accepted: False, or a scale, whose shape DBias has")
    return out


def _gradients(shapes: Mapping[str, Shape], axes: tuple[int, ...], *statistics: str) -> dict[str, Shape]:
    """Shapes of the gradients of a norm over `axes`. statistics: input ports of statistics from forward."""
    x, scale = shapes["input"], shapes.get("scale")
    if shapes["grad"] != x:
        raise GraphValidationError(f"grad must have input's shape {list(x)}, got {list(shapes['grad'])}")
    for port in statistics:
        if shapes[port] != one_per_row(x, axes):
            raise GraphValidationError(
                f"{port} must have input's extents and 1 along the normalized axes {list(axes)}, "
                f"{list(one_per_row(x, axes))}, got {list(shapes[port])}"
            )
    return {"DX": x} if scale is None else {"DX": x, "DScale": scale, "DBias": scale}


def norm_backward_absent(attributes: Attributes, inputs: frozenset[str]) -> frozenset[str]:
    if "scale" not in inputs:
        return frozenset({"DScale", "DBias"})
    return frozenset() if attributes.get("has_dbias", True) else frozenset({"DBias"})


def layernorm_backward(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    axes = _normalized_axes(shapes["input"], shapes.get("scale"))
    return _gradients(shapes, axes, "mean", "inv_variance")


def adalayernorm(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, scale = shapes["input"], shapes["scale"]
    axes = _axes_of_a_sample(x, scale)
    if "bias" in shapes and shapes["bias"] != scale:
        raise GraphValidationError(f"bias must have scale's shape {list(scale)}, got {list(shapes['bias'])}")
    _check_forward(shapes, attributes, LAYERNORM_ORDER)
    return {"Y": x} | dict.fromkeys(("mean", "inv_variance"), one_per_row(x, axes))


def adalayernorm_backward(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    axes = _axes_of_a_sample(shapes["input"], shapes["scale"])
    return _gradients(shapes, axes, "mean", "inv_variance")


def _axes_of_a_sample(x: Shape, scale: Shape) -> tuple[int, ...]:
    fits = len(scale) == len(x) > 1 and scale[0] == x[0]
    if not fits or any(s not in (1, e) for s, e in zip(scale[1:], x[1:], strict=True)):
        raise GraphValidationError(
            f"scale must have the rank of input {list(x)}, 2 or more, and its first extent, that of samples, with each "
            f"other extent 1 or input's, got {list(scale)}"
        )
    return with_elements(x, adalayernorm_axes(x, scale))


def softmax(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x = shapes["input"]
    with_elements(x, (_row_axis(x, attributes),))
    return {"output": x}


def logsumexp(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x = shapes["input"]
    return {"output": one_per_row(x, with_elements(x, (_row_axis(x, attributes),)))}


def softmax_backward(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    y = shapes["output"]
    if shapes["grad"] != y:
        raise GraphValidationError(f"grad must have output's shape {list(y)}, got {list(shapes['grad'])}")
    with_elements(y, (_row_axis(y, attributes),))
    return {"DX": y}


def axis_frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes with a nonnegative axis."""
    return {**attributes, "axis": _row_axis(next(iter(inputs.values())), attributes)}


def _row_axis(x: Shape, attributes: Attributes) -> int:
    axis = attributes["axis"]
    if not -len(x) <= axis < len(x):
        raise GraphValidationError(f"axis {axis} is outside the input's rank {len(x)}; input {list(x)}")
    return axis % len(x)


def reduced(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]):
    x = shapes["input"]
    out = wanted.get("output", (1,) * len(x))
    if len(out) != len(x) or any(o not in (1, e) for o, e in zip(out, x, strict=True)):
        raise GraphValidationError(
            f"output must have the rank of input {list(x)} with each extent 1 or input's, got {list(out)}"
        )
    return {"output": out}


def reduced_axes(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    dim, _ = outputs["output"]
    return {**attributes, "axes": tuple(axis for axis, extent in enumerate(dim) if extent == 1)}


def indexed(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    _row_axis(shapes["input"], attributes)
    return {"output": shapes["input"]}


def quantize_axis(shape: Shape, attributes: Attributes) -> int:
    """The axis that blocks run along: the given one, else the last with an extent other than 1."""
    axis = attributes["axis"]
    if axis is None:
        wide = [i for i, e in enumerate(shape) if e != 1]
        return wide[-1] if wide else len(shape) - 1
    return _row_axis(shape, attributes)


def quantized(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    x, block = shapes["input"], attributes["block_size"]
    if block not in BLOCKS:
        raise GraphValidationError(f"block_size {block} is not supported; accepted: {sorted(BLOCKS)}")
    axis = quantize_axis(x, attributes)
    if x[axis] % block:
        raise GraphValidationError(
            f"extent {x[axis]} of axis {axis} must be a multiple of block_size {block} (input {list(x)})"
        )
    exact = of_blocks(x, axis, block)
    whole = reordering.whole_tiles(exact, axis)
    return {"Y": x, "scale": whole if wanted.get("scale") == whole else exact}


def of_blocks(x: Shape, axis: int, block: int) -> Shape:
    """Shape of a tensor with one element per block along an axis."""
    return tuple(-(-e // block) if i == axis else e for i, e in enumerate(x))


def quantized_stored(attributes: Attributes) -> dict[str, tuple[data_type, ...]]:
    made = BLOCKS[attributes["block_size"]]
    return {"Y": made.elements, "scale": made.scales}


def quantized_frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    made = BLOCKS[attributes["block_size"]]

    def chosen(port: str, accepted: tuple[data_type, ...]) -> data_type:
        _, declared = outputs[port]
        return declared if declared in accepted else accepted[0]  # a virtual output may declare any type

    axis = quantize_axis(inputs["input"], attributes)
    exact = of_blocks(inputs["input"], axis, attributes["block_size"])
    filled = {"scale_dim": outputs["scale"][0]} if "scale" in outputs and outputs["scale"][0] != exact else {}
    return {
        **attributes,
        **filled,
        "axis": axis,
        "element_type": chosen("Y", made.elements),
        "scale_type": chosen("scale", made.scales),
    }
