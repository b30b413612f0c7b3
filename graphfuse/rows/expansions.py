"""Ops that take several steps of a row program, spelled as pointwise steps and reductions.

An entry is all that a kernel needs to know of such an op. The same steps written as nodes of a graph make the same
program, and so the same kernel.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from graphfuse.dtypes import data_type
from graphfuse.enums import reduction_mode
from graphfuse.ops import Attributes, Shape, adalayernorm_axes, rmsnorm_axes
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.steps import Chain, Column, Join, Number, Operand


class Operands(Protocol):
    """What the input ports and the attributes of a node are. A port that is not connected is not in it."""

    def __getitem__(self, port: str) -> Operand: ...
    def __contains__(self, port: object) -> bool: ...
    def attribute(self, name: str) -> object: ...


Values = Mapping[str, "Operand | tuple[Operand, ...]"]
"""By output port: what is computed of each row; or the factors of a product whose sum over all rows it is."""


Columns = Callable[[Mapping[str, Shape], Attributes], tuple[int, ...]]
"""From the shapes of a node's inputs by port, of which "input" or else the first has all rows, and its attributes, to
the axes that a row runs along."""


def _of_scale(shapes: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return rmsnorm_axes(next(iter(shapes.values())), shapes.get("scale"))


def _of_samples(shapes: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return adalayernorm_axes(shapes["input"], shapes["scale"])


def _of_last(shapes: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return (len(shapes["input"]) - 1,)


def _of_axis(shapes: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return (attributes["axis"],)


@dataclass(frozen=True)
class Expansion:
    """of(emitter, operands by input port) -> what each output port is. scalars: input ports of one element in all.
    of_columns: those that are the same for all rows, however few there are. of_rows: those of which there is one a row,
    however few rows or columns there are. columns: the axes of a row."""

    of: Callable[[Emitter, Operands], Values]
    scalars: frozenset[str] = frozenset()
    of_columns: frozenset[str] = frozenset()
    of_rows: frozenset[str] = frozenset()
    columns: Columns = _of_scale


def _mean(e: Emitter, value: Operand) -> Chain:
    return e.op("mul", a=e.reduce(Join.SUM, value), b=Number(1.0 / e.columns))


def _inverse(e: Emitter, value: Operand, epsilon: Operand) -> Chain:
    """1 / sqrt(mean(value^2) + epsilon), the mean not rounded before epsilon is added."""
    squares = e.reduce(Join.SUM, e.op("mul", a=value, b=value))
    return e.op("rsqrt", input=e.op("fma", a=squares, b=Number(1.0 / e.columns), c=epsilon))


def _rmsnorm(e: Emitter, x: Operands) -> Values:
    inverse = _inverse(e, x["input"], x["epsilon"])
    y = e.op("mul", a=x["input"], b=inverse)
    if "scale" in x and "bias" in x:
        y = e.op("fma", a=y, b=x["scale"], c=x["bias"])
    elif "scale" in x:
        y = e.op("mul", a=y, b=x["scale"])
    elif "bias" in x:
        y = e.op("add", a=y, b=x["bias"])
    return {"inv_variance": inverse, "Y": y}


def _layernorm(e: Emitter, x: Operands) -> Values:
    mean = _mean(e, x["input"])
    apart = e.op("sub", a=x["input"], b=mean)
    inverse = _inverse(e, apart, x["epsilon"])
    y = e.op("mul", a=apart, b=inverse)
    if "scale" in x:
        y = e.op("mul", a=y, b=x["scale"])
    if "bias" in x:
        y = e.op("add", a=y, b=x["bias"])
    return {"mean": mean, "inv_variance": inverse, "Y": y}


def _rmsnorm_backward(e: Emitter, x: Operands) -> Values:
    normal = e.op("mul", a=x["input"], b=x["inv_variance"])
    scaled = e.op("mul", a=x["grad"], b=x["scale"]) if "scale" in x else x["grad"]
    mean = _mean(e, e.op("mul", a=scaled, b=normal))
    dx = e.op("mul", a=x["inv_variance"], b=e.op("fnma", c=scaled, a=normal, b=mean))
    return {"DX": dx, "DScale": (x["grad"], normal), "DBias": (x["grad"],)}


def _layernorm_backward(e: Emitter, x: Operands) -> Values:
    normal = e.op("mul", a=e.op("sub", a=x["input"], b=x["mean"]), b=x["inv_variance"])
    scaled = e.op("mul", a=x["grad"], b=x["scale"]) if "scale" in x else x["grad"]
    mean, along = _mean(e, scaled), _mean(e, e.op("mul", a=scaled, b=normal))
    apart = e.op("fnma", c=e.op("sub", a=scaled, b=mean), a=normal, b=along)
    dx = e.op("mul", a=apart, b=x["inv_variance"])
    return {"DX": dx, "DScale": (x["grad"], normal), "DBias": (x["grad"],)}


_LOG2_E = Number(1.4426950408889634)


def _power(e: Emitter, apart: Operand) -> Chain:
    """e^apart, of what is not above zero: the error of the exponent is a part of its size."""
    return e.op("exp2", input=e.op("mul", a=apart, b=_LOG2_E))


def _exponents(e: Emitter, value: Operand, largest: Operand) -> tuple[Chain, Chain]:
    """e^(value - largest), and its sum over the row."""
    powers = _power(e, e.op("sub", a=value, b=largest))
    return powers, e.reduce(Join.SUM, powers)


def _softmax(e: Emitter, x: Operands) -> Values:
    powers, total = _exponents(e, x["input"], e.reduce(Join.MAX, x["input"]))
    return {"output": e.op("mul", a=powers, b=e.op("reciprocal", input=total))}


def _log_softmax(e: Emitter, x: Operands) -> Values:
    largest = e.reduce(Join.MAX, x["input"])
    apart = e.op("sub", a=x["input"], b=largest)
    total = e.reduce(Join.SUM, _power(e, apart))
    return {"output": e.op("sub", a=apart, b=e.op("log", input=total))}


_MOST = data_type.FLOAT.facts.max
FINITE = {"negative_slope": 0.0, "lower_clip": -_MOST, "upper_clip": _MOST}
"""Attributes of a relu that changes nothing but infinities, into the largest finite numbers."""


def _logsumexp(e: Emitter, x: Operands) -> Values:
    # Infinity less infinity would be NaN.
    largest = e.op("relu", FINITE, input=e.reduce(Join.MAX, x["input"]))
    _, total = _exponents(e, x["input"], largest)
    return {"output": e.op("add", a=e.op("log", input=total), b=largest)}


def _softmax_backward(e: Emitter, x: Operands) -> Values:
    total = e.reduce(Join.SUM, e.op("mul", a=x["grad"], b=x["output"]))
    return {"DX": e.op("mul", a=e.op("sub", a=x["grad"], b=total), b=x["output"])}


def _log_softmax_backward(e: Emitter, x: Operands) -> Values:
    total = e.reduce(Join.SUM, x["grad"])
    return {"DX": e.op("sub", a=x["grad"], b=e.op("mul", a=e.op("exp", input=x["output"]), b=total))}


def _chosen(e: Emitter, x: Operands, chosen: Operand, otherwise: Operand) -> Chain:
    """Of each element: one value in the target's column, another elsewhere."""
    index = e.op("identity", input=Column())
    return e.op(
        "binary_select", input0=chosen, input1=otherwise, mask=e.op("cmp_eq", input=index, comparison=x["target"])
    )


def _known(e: Emitter, x: Operands, value: Operand) -> Chain:
    """One a row: `value`, or NaN where the target is the number of no column."""
    inside = e.op("cmp_ge", input=x["target"], comparison=Number(0.0))
    below = e.op("cmp_lt", input=x["target"], comparison=Number(float(e.columns)))
    nan = e.op("sub", a=Number(math.inf), b=Number(math.inf))
    return e.op("binary_select", input0=value, input1=nan, mask=e.op("mul", a=inside, b=below))


def _counted(e: Emitter, x: Operands, value: Operand) -> Chain:
    """`value`, or 0 in a row that is ignored."""
    mask = e.op("cmp_neq", input=x["target"], comparison=Number(float(x.attribute("ignore_index"))))
    return e.op("binary_select", input0=value, input1=Number(0.0), mask=mask)


def _cross_entropy(e: Emitter, x: Operands) -> Values:
    smoothing, z = x.attribute("label_smoothing"), x.attribute("z_loss")
    largest = e.reduce(Join.MAX, x["input"])
    powers = _power(e, e.op("sub", a=x["input"], b=largest))
    total = e.op("log", input=e.reduce(Join.SUM, powers))
    logsumexp = e.op("add", a=total, b=largest)
    # Of the largest what is below it, so that large numbers cancel none of a small loss.
    below = e.op("sub", a=e.reduce(Join.SUM, _chosen(e, x, x["input"], Number(0.0))), b=largest)
    if smoothing:
        mean = e.op("sub", a=_mean(e, x["input"]), b=largest)
        spread = e.op("mul", a=mean, b=Number(smoothing))
        below = e.op("fma", a=below, b=Number(1.0 - smoothing), c=spread)
    loss = e.op("sub", a=total, b=below)
    if z:
        loss = e.op("fma", a=e.op("mul", a=logsumexp, b=logsumexp), b=Number(z), c=loss)
    return {"loss": _counted(e, x, _known(e, x, loss)), "logsumexp": logsumexp}


def _cross_entropy_backward(e: Emitter, x: Operands) -> Values:
    smoothing, z = x.attribute("label_smoothing"), x.attribute("z_loss")
    slope = e.op("exp", input=e.op("sub", a=x["input"], b=x["logsumexp"]))
    if z:
        slope = e.op("mul", a=slope, b=e.op("fma", a=x["logsumexp"], b=Number(2.0 * z), c=Number(1.0)))
    if smoothing:
        slope = e.op("sub", a=slope, b=Number(smoothing / e.columns))
    apart = e.op("sub", a=slope, b=_chosen(e, x, Number(1.0 - smoothing), Number(0.0)))
    return {"DX": _counted(e, x, e.op("mul", a=apart, b=_known(e, x, x["grad"])))}


_EPSILON, _WEIGHTS = frozenset({"epsilon"}), frozenset({"scale", "bias"})
_INVERSE, _MOMENTS = frozenset({"inv_variance"}), frozenset({"mean", "inv_variance"})
_LOSSES = frozenset({"target", "logsumexp", "grad"})

EXPANSIONS = {
    "rmsnorm": Expansion(_rmsnorm, _EPSILON, _WEIGHTS),
    "layernorm": Expansion(_layernorm, _EPSILON, _WEIGHTS),
    "rmsnorm_backward": Expansion(_rmsnorm_backward, of_columns=_WEIGHTS, of_rows=_INVERSE),
    "layernorm_backward": Expansion(_layernorm_backward, of_columns=_WEIGHTS, of_rows=_MOMENTS),
    "adalayernorm": Expansion(_layernorm, _EPSILON, columns=_of_samples),
    "adalayernorm_backward": Expansion(_layernorm_backward, of_rows=_MOMENTS, columns=_of_samples),
    "softmax": Expansion(_softmax, columns=_of_axis),
    "log_softmax": Expansion(_log_softmax, columns=_of_axis),
    "logsumexp": Expansion(_logsumexp, columns=_of_axis),
    "softmax_backward": Expansion(_softmax_backward, columns=_of_axis),
    "log_softmax_backward": Expansion(_log_softmax_backward, columns=_of_axis),
    "cross_entropy": Expansion(_cross_entropy, of_rows=frozenset({"target"}), columns=_of_last),
    "cross_entropy_backward": Expansion(_cross_entropy_backward, of_rows=_LOSSES, columns=_of_last),
}
"""By op."""


REDUCED: Mapping[reduction_mode, Callable[[Emitter, Operand], Chain]] = {
    reduction_mode.ADD: lambda e, x: e.reduce(Join.SUM, x),
    reduction_mode.AVG: _mean,
    reduction_mode.NORM1: lambda e, x: e.reduce(Join.SUM, e.op("abs", input=x)),
    reduction_mode.NORM2: lambda e, x: e.op("sqrt", input=e.reduce(Join.SUM, e.op("mul", a=x, b=x))),
    reduction_mode.MAX: lambda e, x: e.reduce(Join.MAX, x),
    reduction_mode.MIN: lambda e, x: e.op("neg", input=e.reduce(Join.MAX, e.op("neg", input=x))),
    reduction_mode.AMAX: lambda e, x: e.reduce(Join.MAX, e.op("abs", input=x)),
}
"""By the mode of ``reduction``."""
