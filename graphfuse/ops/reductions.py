"""`Reduction`, the definition of each mode of the op ``reduction``."""

from collections.abc import Callable
from dataclasses import dataclass

from graphfuse.base.enums import reduction_mode
from graphfuse.ops.expansion import Join, RowArithmetic
from graphfuse.ops.pullback import NoRule, Pullback, Rule, passed, sign


@dataclass(frozen=True)
class Reduction:
    """Reduction of a row to one value.

    start: the result for no elements. of(arithmetic, elements) -> one value per row.
    fold: C++ that combines the result so far, {to}, with an array of values, {values}; None if no kernel needs it.
    vjp: builds the gradient of the elements; returns a NoRule if there is none.
    in_rows: whether kernels of rows support it. Others are products, which only `torch_expansion` computes.
    """

    start: float
    of: Callable[[RowArithmetic, object], object]
    fold: str | None = None
    in_rows: bool = True
    vjp: Rule = passed


_INFINITY = float("inf")


def _magnitudes(e: RowArithmetic, x: object) -> object:
    return e.op("abs", input=x)


def _min(e: RowArithmetic, x: object) -> object:
    return e.op("neg", input=e.reduce(Join.MAX, e.op("neg", input=x)))


def _but_zeros(e: RowArithmetic, x: object) -> object:
    return e.product(e.op("binary_select", input0=1.0, input1=x, mask=e.op("cmp_eq", input=x, comparison=0.0)))


def _of_chosen(p: Pullback, values: object, mode: reduction_mode) -> object:
    """The gradient, divided equally among the elements that equal the result. mode: MIN or MAX."""
    # Not forward's result: values that are computed again may be rounded otherwise, so that none equals it.
    chosen = p.graph.cmp_eq(values, p.graph.reduction(values, mode=mode).set_dim(p.dim_of("output")))
    count = p.graph.reduction(chosen, mode=reduction_mode.ADD).set_dim(p.dim_of("output"))
    return p.graph.mul(p.graph.mul(p.grad, p.graph.reciprocal(count)), chosen)


def _of_extreme(p: Pullback) -> object:
    return _of_chosen(p, p["input"], p.attributes["mode"])


def _of_magnitude(p: Pullback) -> object:
    return p.graph.mul(_of_chosen(p, p.graph.abs(p["input"]), reduction_mode.MAX), sign(p, p["input"]))


def _of_length(p: Pullback) -> object:
    """input / length * grad; 0 in a row of zeros."""
    return p.graph.mul(p["input"], p.graph.binary_select(p.graph.div(p.grad, p["output"]), 0.0, p["output"]))


def _of_but_zeros(p: Pullback) -> object:
    over = p.graph.div(p.graph.mul(p.grad, p["output"]), p["input"])
    return p.graph.binary_select(over, 0.0, p["input"])


_NO_PRODUCT = NoRule("the gradient of a product would be divided by elements, which may be 0; MUL_NO_ZEROS has one")

REDUCTIONS = {
    reduction_mode.ADD: Reduction(0.0, lambda e, x: e.reduce(Join.SUM, x)),
    reduction_mode.MUL: Reduction(1.0, lambda e, x: e.product(x), in_rows=False, vjp=lambda p: _NO_PRODUCT),
    reduction_mode.MIN: Reduction(_INFINITY, _min, vjp=_of_extreme),
    reduction_mode.MAX: Reduction(
        -_INFINITY, lambda e, x: e.reduce(Join.MAX, x), "gf::max({to}, gf::largest({values}))", vjp=_of_extreme
    ),
    reduction_mode.AMAX: Reduction(
        0.0,
        lambda e, x: e.reduce(Join.MAX, _magnitudes(e, x)),
        "gf::max({to}, gf::max_magnitude({values}))",
        vjp=_of_magnitude,
    ),
    reduction_mode.AVG: Reduction(
        float("nan"), lambda e, x: e.mean(x), vjp=lambda p: p.graph.mul(p.grad, 1.0 / max(p.elements("output"), 1))
    ),
    reduction_mode.NORM1: Reduction(
        0.0, lambda e, x: e.reduce(Join.SUM, _magnitudes(e, x)), vjp=lambda p: p.graph.mul(p.grad, sign(p, p["input"]))
    ),
    reduction_mode.NORM2: Reduction(
        0.0, lambda e, x: e.op("sqrt", input=e.reduce(Join.SUM, e.op("mul", a=x, b=x))), vjp=_of_length
    ),
    reduction_mode.MUL_NO_ZEROS: Reduction(1.0, _but_zeros, in_rows=False, vjp=_of_but_zeros),
}
