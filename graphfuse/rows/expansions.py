"""Ops that are several steps of a row program, each spelled in pointwise steps and reductions.

An entry is all that a kernel needs to know of such an op: the same steps written by hand as nodes of a graph make the
same program, and so the same kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphfuse.enums import reduction_mode
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.steps import Chain, Join, Number, Operand

Operands = Mapping[str, Operand]
Values = Mapping[str, "Operand | tuple[Operand, ...]"]
"""By output port: what is computed of each row; or the factors of a product whose sum over all rows it is."""


@dataclass(frozen=True)
class Expansion:
    """of(emitter, operands by input port) -> what each output port is. scalars: input ports of one element in all.
    of_columns: those that are the same for all rows, however few there are."""

    of: Callable[[Emitter, Operands], Values]
    scalars: frozenset[str] = frozenset()
    of_columns: frozenset[str] = frozenset()


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


_WEIGHTS = frozenset({"scale", "bias"})

EXPANSIONS = {
    "rmsnorm": Expansion(_rmsnorm, frozenset({"epsilon"}), _WEIGHTS),
    "layernorm": Expansion(_layernorm, frozenset({"epsilon"}), _WEIGHTS),
    "rmsnorm_backward": Expansion(_rmsnorm_backward, of_columns=_WEIGHTS),
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
