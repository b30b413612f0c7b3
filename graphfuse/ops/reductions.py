"""How each mode of the op ``reduction`` combines values."""

from collections.abc import Callable
from dataclasses import dataclass

from graphfuse.base.enums import reduction_mode
from graphfuse.ops.expansion import Join, RowArithmetic


@dataclass(frozen=True)
class Reduction:
    """Operation that makes the elements of a row one. start: the result of none. of(arithmetic, elements) -> one value
    a row.

    fold: C++ of the result so far, {to}, joined with an array of more, {values}; None for what no kernel does.
    in_rows: whether kernels of rows do it; others are products, which `by_torch` alone makes.
    """

    start: float
    of: Callable[[RowArithmetic, object], object]
    fold: str | None = None
    in_rows: bool = True


_INFINITY = float("inf")


def _magnitudes(e: RowArithmetic, x: object) -> object:
    return e.op("abs", input=x)


def _min(e: RowArithmetic, x: object) -> object:
    return e.op("neg", input=e.reduce(Join.MAX, e.op("neg", input=x)))


def _norm2(e: RowArithmetic, x: object) -> object:
    return e.op("sqrt", input=e.reduce(Join.SUM, e.op("mul", a=x, b=x)))


def _but_zeros(e: RowArithmetic, x: object) -> object:
    return e.product(e.op("binary_select", input0=1.0, input1=x, mask=e.op("cmp_eq", input=x, comparison=0.0)))


REDUCTIONS = {
    reduction_mode.ADD: Reduction(0.0, lambda e, x: e.reduce(Join.SUM, x)),
    reduction_mode.MUL: Reduction(1.0, lambda e, x: e.product(x), in_rows=False),
    reduction_mode.MIN: Reduction(_INFINITY, _min),
    reduction_mode.MAX: Reduction(
        -_INFINITY, lambda e, x: e.reduce(Join.MAX, x), "gf::max({to}, gf::largest({values}))"
    ),
    reduction_mode.AMAX: Reduction(
        0.0, lambda e, x: e.reduce(Join.MAX, _magnitudes(e, x)), "gf::max({to}, gf::max_magnitude({values}))"
    ),
    reduction_mode.AVG: Reduction(float("nan"), lambda e, x: e.mean(x)),
    reduction_mode.NORM1: Reduction(0.0, lambda e, x: e.reduce(Join.SUM, _magnitudes(e, x))),
    reduction_mode.NORM2: Reduction(0.0, _norm2),
    reduction_mode.MUL_NO_ZEROS: Reduction(1.0, _but_zeros, in_rows=False),
}
