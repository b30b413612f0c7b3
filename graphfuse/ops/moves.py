"""Ops that move elements: transpose, slice, reshape and expand. They change no value, whatever the compute type."""

import math
from collections.abc import Mapping

from graphfuse.base.enums import reshape_mode
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.layouts import packed_stride, row_major
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape, Stride
from graphfuse.ops.pullback import Pullback


def _transposed(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, order = shapes["input"], attributes["permutation"]
    if sorted(order) != list(range(len(x))):
        raise GraphValidationError(
            f"permutation must have each of input's axes 0 to {len(x) - 1} once, got {list(order)} (input {list(x)})"
        )
    return {"output": tuple(x[axis] for axis in order)}


def _transposed_strides(dim: Shape, attributes: Attributes, inputs: Mapping[str, Stride]) -> Stride:
    return _without_overlap(dim, tuple(inputs["input"][axis] for axis in attributes["permutation"]))


def _ranges(x: Shape, attributes: Attributes) -> tuple[range, ...]:
    slices = attributes["slices"]
    if len(slices) != len(x):
        raise GraphValidationError(f"slices must be one for each axis of input {list(x)}, got {len(slices)}")
    found = []
    for axis, (given, extent) in enumerate(zip(slices, x, strict=True)):
        s = given if isinstance(given, slice) else slice(*given)  # the form in frozen nodes
        try:
            indices = range(*s.indices(extent))
        except (TypeError, ValueError) as error:
            raise GraphValidationError(f"slice {s} of axis {axis}: {error}") from None
        if indices.step < 1:
            raise GraphValidationError(f"slice {s} of axis {axis} has step {indices.step}; accepted: 1 and above")
        found.append(indices)
    return tuple(found)


def _sliced_strides(dim: Shape, attributes: Attributes, inputs: Mapping[str, Stride]) -> Stride:
    steps = (1 if s.step is None else s.step.__index__() for s in attributes["slices"])
    return _without_overlap(dim, tuple(stride * step for stride, step in zip(inputs["input"], steps, strict=True)))


def _sliced_frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes with slices as nonnegative (first, end, step) of each axis."""
    return {"slices": tuple((r.start, r.stop, r.step) for r in _ranges(inputs["input"], attributes))}


def _reshaped(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    x, mode = shapes["input"], attributes["reshape_mode"]
    if mode is not reshape_mode.LOGICAL:
        raise GraphValidationError(
            f"reshape_mode is {mode}; accepted: {reshape_mode.LOGICAL}, which is the same for tensors that lie in "
            "row-major order without gaps"
        )
    made = required_shape(wanted)
    if math.prod(made) != math.prod(x):
        raise GraphValidationError(
            f"output must have as many elements as input, {math.prod(x)}, got {list(made)} with {math.prod(made)} "
            f"(input {list(x)})"
        )
    return {"output": made}


def required_shape(wanted: Mapping[str, Shape]) -> Shape:
    """The output's shape, which the user must set. Raises GraphValidationError otherwise."""
    if "output" not in wanted:
        raise GraphValidationError("output has no dim, which nothing else says: call set_dim on it")
    return wanted["output"]


def with_dim(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes with the shape of the only output."""
    ((dim, _),) = outputs.values()
    return {**attributes, "dim": tuple(dim)}


def _expanded(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    x, made = shapes["input"], required_shape(wanted)
    if len(x) != len(made) or any(e not in (1, m) for e, m in zip(x, made, strict=True)):
        raise GraphValidationError(
            f"output must have input's rank, and its extents where they are not 1, got {list(made)} of input {list(x)}"
        )
    return {"output": made}


def _without_overlap(dim: Shape, strides: Stride) -> Stride:
    """`strides`, unless elements share an address, as in a broadcast input; then strides without gaps."""
    shared = any(extent > 1 and not stride for extent, stride in zip(dim, strides, strict=True))
    return packed_stride(dim) if shared else strides


def _transposed_back(p: Pullback) -> object:
    order = p.attributes["permutation"]
    return p.graph.transpose(p.whole("output"), permutation=tuple(map(order.index, range(len(order)))))


def _padded(p: Pullback) -> object:
    """The gradient of a slice, padded with zeros to the shape of its input."""
    grad, dim = p.whole("output"), list(p.dim_of("output"))
    x = p.dim_of("input")
    for axis, indices in enumerate(_ranges(x, p.attributes)):
        grad = _spread(p, grad, dim, axis, indices.step)
        for extent, first in ((indices.start, True), (x[axis] - indices.start - dim[axis], False)):
            if extent > 0:
                zeros = p.zeros((*dim[:axis], extent, *dim[axis + 1 :]))
                grad = p.graph.join(*((zeros, grad) if first else (grad, zeros)), axis=axis)
                dim[axis] += extent
    return grad


def _spread(p: Pullback, grad: object, dim: list[int], axis: int, step: int) -> object:
    """`grad` with step - 1 zeros between its elements along an axis. `dim` is updated to its shape."""
    if step == 1 or dim[axis] < 2:
        return grad
    count, behind = dim[axis], dim[axis + 1 :]
    grad = p.graph.reshape(grad).set_dim((*dim[:axis], count, 1, *behind))
    grad = p.graph.join(grad, p.zeros((*dim[:axis], count, step - 1, *behind)), axis=axis + 1)
    grad = p.graph.reshape(grad).set_dim((*dim[:axis], count * step, *behind))
    dim[axis] = (count - 1) * step + 1
    return p.graph.slice(grad, slices=tuple(slice(0, extent) for extent in dim))


TABLE = (
    Op(
        "transpose",
        "input with its axes in another order: axis i of the output is axis permutation[i] of input. Unless set, the\n"
        "output's strides are input's in that order, as of a view.",
        inputs=(Port("input", moved=True),),
        infer=_transposed,
        strides=_transposed_strides,
        reference=lambda t, x, a: {"output": x["input"].permute(a["permutation"])},
        attributes=(Attribute("permutation", (int,), required=True, several=True),),
        vjp={"input": _transposed_back},
    ),
    Op(
        "slice",
        "The elements of input that slices select, a Python slice with a step above 0 for each axis. Unless set, the\n"
        "output's strides are input's times the steps, as of a view.",
        inputs=(Port("input", moved=True),),
        infer=lambda shapes, attributes, _: {"output": tuple(map(len, _ranges(shapes["input"], attributes)))},
        strides=_sliced_strides,
        frozen=_sliced_frozen,
        reference=lambda t, x, a: {"output": x["input"][tuple(slice(*s) for s in a["slices"])]},
        attributes=(Attribute("slices", (slice,), required=True, several=True),),
        vjp={"input": _padded},
    ),
    Op(
        "reshape",
        "The elements of input in row-major order of their indices, in another shape with as many elements, which\n"
        "must be set as the dim of the output. cuDNN's default is the order of elements in memory (VIEW_ONLY), which\n"
        "is the same for tensors in row-major order without gaps.",
        inputs=(Port("input", moved=True),),
        infer=_reshaped,
        strides=row_major,
        frozen=with_dim,
        reference=lambda t, x, a: {"output": x["input"].reshape(a["dim"])},
        attributes=(Attribute("reshape_mode", (reshape_mode,), reshape_mode.LOGICAL),),
        vjp={"input": lambda p: p.graph.reshape(p.whole("output")).set_dim(p.dim_of("input"))},
    ),
    Op(
        "expand",
        "input broadcast to the output's dim, which must be set: elements are repeated along axes on which input has\n"
        "extent 1.",
        inputs=(Port("input", moved=True),),
        infer=_expanded,
        strides=row_major,
        frozen=with_dim,
        reference=lambda t, x, a: {"output": x["input"].expand(a["dim"])},
        vjp={"input": lambda p: p.whole("output")},  # differentiate sums the gradient over repeated elements
    ),
)
