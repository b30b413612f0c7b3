"""Losses of rows: cross entropy with class numbers as targets, and its gradient."""

import functools
import math
from collections.abc import Mapping

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.expansion import Expansion, Join, RowArithmetic, Values
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NO_SECOND, NoRule, Pullback
from graphfuse.ops.shapes import along_last

MOST_IGNORED = 2**24  # targets are compared in float32, which cannot represent all integers from here on

_ATTRIBUTES = (
    Attribute("ignore_index", (int,), -100),
    Attribute("label_smoothing", (float, int), 0.0),
    Attribute("z_loss", (float, int), 0.0),
)


def _checked(shapes: Mapping[str, Shape], attributes: Attributes) -> Shape:
    """Shape of values per row. Raises GraphValidationError for invalid inputs and attributes."""
    x = shapes["input"]
    if x[-1] == 0:
        raise GraphValidationError(f"input {list(x)} has no columns; at least 1 is needed")
    row = (*x[:-1], 1)
    for port in shapes.keys() - {"input"}:
        if shapes[port] != row:
            raise GraphValidationError(
                f"{port} must have input's extents and 1 along the last axis, {list(row)}, got {list(shapes[port])}"
            )
    ignored, smoothing, z = (attributes[a.name] for a in _ATTRIBUTES)
    if abs(ignored) >= MOST_IGNORED:
        raise GraphValidationError(f"ignore_index is {ignored}; accepted: magnitudes below 2^24")
    if not 0 <= smoothing <= 1:
        raise GraphValidationError(f"label_smoothing is {smoothing}; accepted: 0 to 1")
    if not 0 <= z < math.inf:
        raise GraphValidationError(f"z_loss is {z}; accepted: 0 and finite numbers above")
    return row


def _gradient_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    _checked(shapes, attributes)
    return {"DX": shapes["input"]}


def _chosen(e: RowArithmetic, x: Values, chosen: object, otherwise: object) -> object:
    """Elementwise value: `chosen` in the target's column, `otherwise` in others."""
    mask = e.op("cmp_eq", input=e.numbers(), comparison=x["target"])
    return e.op("binary_select", input0=chosen, input1=otherwise, mask=mask)


def _known(e: RowArithmetic, x: Values, value: object) -> object:
    """Value per row: `value`, or NaN if the target is not the number of a column."""
    inside = e.op("cmp_ge", input=x["target"], comparison=0.0)
    below = e.op("cmp_lt", input=x["target"], comparison=float(e.columns))
    nan = e.op("sub", a=math.inf, b=math.inf)
    return e.op("binary_select", input0=value, input1=nan, mask=e.op("mul", a=inside, b=below))


def _counted(e: RowArithmetic, x: Values, a: Attributes, value: object) -> object:
    """`value`, or 0 in a row that is ignored."""
    mask = e.op("cmp_neq", input=x["target"], comparison=float(a["ignore_index"]))
    return e.op("binary_select", input0=value, input1=0.0, mask=mask)


def _cross_entropy(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    smoothing, z = a["label_smoothing"], a["z_loss"]
    largest = e.reduce(Join.MAX, x["input"])
    powers = e.power(e.op("sub", a=x["input"], b=largest))
    total = e.op("log", input=e.reduce(Join.SUM, powers))
    logsumexp = e.op("add", a=total, b=largest)
    # Relative to the largest, so that large logits do not cancel a small loss.
    below = e.op("sub", a=e.reduce(Join.SUM, _chosen(e, x, x["input"], 0.0)), b=largest)
    if smoothing:
        mean = e.op("sub", a=e.mean(x["input"]), b=largest)
        spread = e.op("mul", a=mean, b=smoothing)
        below = e.op("fma", a=below, b=1.0 - smoothing, c=spread)
    loss = e.op("sub", a=total, b=below)
    if z:
        loss = e.op("fma", a=e.op("mul", a=logsumexp, b=logsumexp), b=z, c=loss)
    return {"loss": _counted(e, x, a, _known(e, x, loss)), "logsumexp": logsumexp}


def _cross_entropy_backward(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    smoothing, z = a["label_smoothing"], a["z_loss"]
    slope = e.op("exp", input=e.op("sub", a=x["input"], b=x["logsumexp"]))
    if z:
        slope = e.op("mul", a=slope, b=e.op("fma", a=x["logsumexp"], b=2.0 * z, c=1.0))
    if smoothing:
        slope = e.op("sub", a=slope, b=smoothing / e.columns)
    rest = e.op("sub", a=slope, b=_chosen(e, x, 1.0 - smoothing, 0.0))
    return {"DX": _counted(e, x, a, e.op("mul", a=rest, b=_known(e, x, x["grad"])))}


def _of_logits(p: Pullback) -> object:
    """The gradient of input from that of the loss, and from that of logsumexp, if they have one."""
    g, found = p.graph, []
    if "loss" in p.grads:
        given = p.whole("loss"), p["input"], p["target"], p["logsumexp"]
        found.append(g.cross_entropy_backward(*given, **p.attributes))
    if "logsumexp" in p.grads:
        found.append(g.mul(p.grads["logsumexp"], g.exp(g.sub(p["input"], p["logsumexp"]))))
    return functools.reduce(g.add, found)


_WHAT = (
    "target: the number of a column for each row, of any type, including INT32 and INT64. Rows whose target is\n"
    "ignore_index are ignored. A target that is neither ignore_index nor the number of a column makes {} NaN,\n"
    "without a read out of bounds. "
)

TABLE = (
    Op(
        "cross_entropy",
        "Cross entropy of the softmax of each row of input, along its last axis, with the target's column:\n"
        "loss = logsumexp - (1 - label_smoothing) * input[target] - label_smoothing * mean(input)\n"
        "+ z_loss * logsumexp^2, with logsumexp = log(sum(exp(input))), and 0 for ignored rows. "
        + _WHAT.format("the loss")
        + "A row with infinity, or\nonly of -infinity, has NaN for both. Returns [loss, logsumexp], one value per row "
        "each, FLOAT unless set.",
        inputs=(Port("input"), Port("target")),
        outputs=(Port("loss", dtype=data_type.FLOAT), Port("logsumexp", dtype=data_type.FLOAT)),
        infer=lambda shapes, attributes, _: dict.fromkeys(("loss", "logsumexp"), _checked(shapes, attributes)),
        expansion=Expansion(_cross_entropy, along_last, of_rows=frozenset({"target"})),
        attributes=_ATTRIBUTES,
        vjp={"input": _of_logits, "target": NoRule("class numbers have no gradient", constant=True)},
    ),
    Op(
        "cross_entropy_backward",
        "Gradient of cross_entropy, from grad, that of the loss, one per row, and its output logsumexp:\n"
        "DX = grad * (exp(input - logsumexp) * (1 + 2 * z_loss * logsumexp) - (1 - label_smoothing) * [column =\n"
        "target] - label_smoothing / columns), and 0 in ignored rows, whatever their grad and input. "
        + _WHAT.format("the row's DX")
        + "Attributes\nas in cross_entropy. Returns DX.",
        inputs=(Port("grad"), Port("input"), Port("target"), Port("logsumexp")),
        outputs=(Port("DX"),),
        infer=_gradient_shapes,
        expansion=Expansion(_cross_entropy_backward, along_last, of_rows=frozenset({"target", "logsumexp", "grad"})),
        attributes=_ATTRIBUTES,
        vjp=NO_SECOND,
    ),
)
