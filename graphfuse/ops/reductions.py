"""How each mode of the op ``reduction`` combines values."""

from collections.abc import Callable
from dataclasses import dataclass

from graphfuse.enums import reduction_mode


@dataclass(frozen=True)
class Reduction:
    """How the elements of one axis become one. start: the result of none. of(t, elements): along the last axis.

    fold: C++ of the result so far, {to}, joined with an array of more, {values}; None for what no kernel does.
    """

    start: float
    of: Callable[..., object]
    fold: str | None = None


_INFINITY = float("inf")

REDUCTIONS = {
    reduction_mode.ADD: Reduction(0.0, lambda t, x: x.sum(-1)),
    reduction_mode.MUL: Reduction(1.0, lambda t, x: x.prod(-1)),
    reduction_mode.MIN: Reduction(_INFINITY, lambda t, x: x.amin(-1)),
    reduction_mode.MAX: Reduction(-_INFINITY, lambda t, x: x.amax(-1), "gf::max({to}, gf::largest({values}))"),
    reduction_mode.AMAX: Reduction(0.0, lambda t, x: x.abs().amax(-1), "gf::max({to}, gf::max_magnitude({values}))"),
    reduction_mode.AVG: Reduction(float("nan"), lambda t, x: x.mean(-1)),
    reduction_mode.NORM1: Reduction(0.0, lambda t, x: x.abs().sum(-1)),
    reduction_mode.NORM2: Reduction(0.0, lambda t, x: (x * x).sum(-1).sqrt()),
    reduction_mode.MUL_NO_ZEROS: Reduction(1.0, lambda t, x: t.where(x == 0, t.ones_like(x), x).prod(-1)),
}
