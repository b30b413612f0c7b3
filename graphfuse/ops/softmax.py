"""Softmax, log-softmax and log-sum-exp, and their gradients."""

from collections.abc import Mapping
from functools import partial

from graphfuse.base.dtypes import data_type
from graphfuse.ops import shapes
from graphfuse.ops.expansion import Expansion, Join, RowArithmetic, Values
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NO_SECOND


def _of_axis(dims: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return (attributes["axis"],)


def _exponents(e: RowArithmetic, value: object, largest: object) -> tuple[object, object]:
    """e^(value - largest), and its sum over the row."""
    powers = e.power(e.op("sub", a=value, b=largest))
    return powers, e.reduce(Join.SUM, powers)


def _softmax(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    powers, total = _exponents(e, x["input"], e.reduce(Join.MAX, x["input"]))
    return {"output": e.op("mul", a=powers, b=e.op("reciprocal", input=total))}


def _log_softmax(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    largest = e.reduce(Join.MAX, x["input"])
    centred = e.op("sub", a=x["input"], b=largest)
    total = e.reduce(Join.SUM, e.power(centred))
    return {"output": e.op("sub", a=centred, b=e.op("log", input=total))}


def _logsumexp(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    # infinity - infinity would be NaN: infinities become the largest finite numbers.
    finite = {"negative_slope": 0.0, "lower_clip": -e.most, "upper_clip": e.most}
    largest = e.op("relu", finite, input=e.reduce(Join.MAX, x["input"]))
    _, total = _exponents(e, x["input"], largest)
    return {"output": e.op("add", a=e.op("log", input=total), b=largest)}


def _softmax_backward(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    total = e.reduce(Join.SUM, e.op("mul", a=x["grad"], b=x["output"]))
    return {"DX": e.op("mul", a=e.op("sub", a=x["grad"], b=total), b=x["output"])}


def _log_softmax_backward(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    total = e.reduce(Join.SUM, x["grad"])
    return {"DX": e.op("sub", a=x["grad"], b=e.op("mul", a=e.op("exp", input=x["output"]), b=total))}


_AXIS = Attribute("axis", (int,), -1)

_along_axis = partial(Op, frozen=shapes.axis_frozen, attributes=(_AXIS,))

TABLE = (
    _along_axis(
        "softmax",
        "e^input divided by its sum along axis, computed from e^(input - m), with m the largest along axis, so that\n"
        "nothing overflows. -infinity becomes 0. If all are -infinity, or one is infinity or NaN, all become NaN.",
        inputs=(Port("input"),),
        infer=shapes.softmax,
        expansion=Expansion(_softmax, _of_axis),
        vjp={"input": lambda p: p.graph.softmax_backward(p.whole("output"), p["output"], **p.attributes)},
    ),
    _along_axis(
        "log_softmax",
        "The logarithm of softmax along axis, as input - m - log(sum(e^(input - m))) with m the largest along axis.\n"
        "-infinity remains. If all are -infinity, or one is infinity or NaN, all become NaN.",
        inputs=(Port("input"),),
        infer=shapes.softmax,
        expansion=Expansion(_log_softmax, _of_axis),
        vjp={"input": lambda p: p.graph.log_softmax_backward(p.whole("output"), p["output"], **p.attributes)},
    ),
    _along_axis(
        "logsumexp",
        "log(sum(e^input)) along axis, whose extent becomes 1, as m + log(sum(e^(input - m))) with m the largest\n"
        "along axis. If all are -infinity, it is -infinity; if one is infinity and none NaN, infinity.\n"
        "Stored as FLOAT unless set otherwise.",
        inputs=(Port("input"),),
        outputs=(Port("output", dtype=data_type.FLOAT, label="OUT_0"),),
        infer=shapes.logsumexp,
        expansion=Expansion(_logsumexp, _of_axis),
        vjp={"input": lambda p: p.graph.mul(p.grad, p.graph.exp(p.graph.sub(p["input"], p["output"])))},
    ),
    _along_axis(
        "softmax_backward",
        "Gradient of softmax, from grad, that of its output, and output: (grad - sum(grad * output)) * output, the\n"
        "sum along axis. Returns DX.",
        inputs=(Port("grad"), Port("output")),
        outputs=(Port("DX"),),
        infer=shapes.softmax_backward,
        expansion=Expansion(_softmax_backward, _of_axis),
        vjp={
            "grad": lambda p: p.graph.softmax_backward(p.whole("DX"), p["output"], **p.attributes),
            "output": NO_SECOND,
        },
    ),
    _along_axis(
        "log_softmax_backward",
        "Gradient of log_softmax, from grad, that of its output, and output: grad - e^output * sum(grad), the sum\n"
        "along axis. Returns DX.",
        inputs=(Port("grad"), Port("output")),
        outputs=(Port("DX"),),
        infer=shapes.softmax_backward,
        expansion=Expansion(_log_softmax_backward, _of_axis),
        vjp=NO_SECOND,
    ),
)
