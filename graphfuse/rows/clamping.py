"""Simplification of clamps.

A comparison and a choice between a value and a bound become a maximum or a minimum. A clamp that never changes a value
is dropped, and so is one that the conversion to the stored type does anyway."""

import math
from collections.abc import Callable, Sequence

from graphfuse.base.dtypes import data_type
from graphfuse.rows.rounding import is_exact
from graphfuse.rows.steps import AnyStep, Chain, Operand, Step

Known = Callable[[Operand], float | None]
"""Function that returns the value of an operand; None if unknown."""

_LARGER = {"cmp_lt": "max", "cmp_gt": "min"}


def clamped(steps: Sequence[AnyStep], number: Known) -> list[AnyStep]:
    """The steps with choices replaced by maxima and minima. Comparisons may have no readers left.

    Bounds of zero and NaN are not replaced: a comparison ignores the sign of zero, and never chooses NaN.
    """
    made: list[AnyStep] = []
    for step in steps:
        made.append(_chosen(made, step, number) or step)
    return made


def _chosen(steps: Sequence[AnyStep], step: AnyStep, number: Known) -> Step | None:
    """A step equivalent to a choice by a comparison; None if there is none."""
    if step.op_name != "binary_select":
        return None
    chosen = dict(step.operands)
    bound, value, mask = chosen["input0"], chosen["input1"], chosen["mask"]
    compared = steps[mask.index] if isinstance(mask, Chain) else None
    if compared is None or compared.op_name not in _LARGER:
        return None
    (_, first), (_, second) = compared.operands
    other, known = number(second), number(bound)
    if other is None:
        return None
    least, most = _range(steps, first, number)
    if most <= other if compared.op_name == "cmp_gt" else least >= other:
        return Step("identity", (("input", value),), (), step.rounded)  # comparing NaN is false, too
    if (first, other) != (value, known) or known == 0 or known != known:
        return None
    return Step(_LARGER[compared.op_name], (("input0", bound), ("input1", value)), (), step.rounded)


def _range(steps: Sequence[AnyStep], o: Operand, number: Known) -> tuple[float, float]:
    """Range of a value, from the steps that compute it, unless it is NaN."""
    known = number(o)
    if known is not None and known == known:
        return known, known
    step = steps[o.index] if isinstance(o, Chain) else None
    if not isinstance(step, Step) or step.op_name not in _RANGES:
        return _EVERYTHING
    least, most = _RANGES[step.op_name](*(_range(steps, operand, number) for _, operand in step.operands))
    # Rounding to a type keeps a value within bounds that the type represents exactly.
    kept = (step.rounded is None or is_exact(bound, step.rounded) for bound in (least, most))
    return tuple(bound if has else beyond for bound, has, beyond in zip((least, most), kept, _EVERYTHING, strict=True))


_EVERYTHING = (-math.inf, math.inf)
_RANGES = {
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "abs": lambda a: (max(0.0, a[0], -a[1]), max(-a[0], a[1])),
    "identity": lambda a: a,
}
"""Range of a result, from the ranges of the operands."""


def unbounded(steps: Sequence[AnyStep], value: Chain, dtype: data_type, number: Known) -> Chain:
    """The operand of clamps, and of roundings to integers, that the conversion to `dtype` makes redundant.

    dtype: the type that the value is stored as. Its conversion saturates, infinities too.
    """
    while before := _beyond(steps[value.index], dtype, number):
        value = before
    return value


def _beyond(step: AnyStep, dtype: data_type, number: Known) -> Chain | None:
    """The operand of a step that the conversion to a type makes redundant; None for other steps."""
    if not isinstance(step, Step) or step.rounded is not None and not step.exact:
        return None
    operands, facts = [o for _, o in step.operands], dtype.facts
    least, most = facts.integers or (-facts.max, facts.max)
    if step.op_name in _BEYOND:
        beyond = _BEYOND[step.op_name]
        operands = [o for o in operands if (known := number(o)) is None or not beyond(known, least, most)]
    elif step.op_name != "identity" and not (step.op_name == "round" and facts.integers):
        return None
    return operands[0] if len(operands) == 1 and isinstance(operands[0], Chain) else None


_BEYOND = {"max": lambda bound, least, most: bound <= least, "min": lambda bound, least, most: bound >= most}
"""True if a bound does not change values between `least` and `most`, by op."""
