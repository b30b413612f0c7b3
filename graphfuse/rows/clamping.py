"""A value or a bound, chosen by comparing the two, is the larger or the smaller of them. What is within a bound is not
replaced for being beyond it. Bounds that a type has are none."""

import math
from collections.abc import Callable, Sequence

from graphfuse.base.dtypes import data_type
from graphfuse.rows.rounding import is_exact
from graphfuse.rows.steps import AnyStep, Chain, Operand, Step

Known = Callable[[Operand], float | None]
"""The value of an operand, if it is known."""

_LARGER = {"cmp_lt": "max", "cmp_gt": "min"}


def clamped(steps: Sequence[AnyStep], number: Known) -> list[AnyStep]:
    """The steps. Comparisons may have no readers left.

    Zeros have signs, which comparing does not see, and NaN as a bound is never chosen by it: these are left.
    """
    made: list[AnyStep] = []
    for step in steps:
        made.append(_chosen(made, step, number) or step)
    return made


def _chosen(steps: Sequence[AnyStep], step: AnyStep, number: Known) -> Step | None:
    """A step that does what choosing by comparing does."""
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
    """Bounds that steps give a value, if it is no NaN."""
    known = number(o)
    if known is not None and known == known:
        return known, known
    step = steps[o.index] if isinstance(o, Chain) else None
    if not isinstance(step, Step) or step.op_name not in _RANGES:
        return _EVERYTHING
    least, most = _RANGES[step.op_name](*(_range(steps, operand, number) for _, operand in step.operands))
    # Rounding to a type leaves what is bounded by a number of that type within the bound.
    kept = (step.rounded is None or is_exact(bound, step.rounded) for bound in (least, most))
    return tuple(bound if has else beyond for bound, has, beyond in zip((least, most), kept, _EVERYTHING, strict=True))


_EVERYTHING = (-math.inf, math.inf)
_RANGES = {
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "abs": lambda a: (max(0.0, a[0], -a[1]), max(-a[0], a[1])),
    "identity": lambda a: a,
}
"""Of a result, by those of the operands."""


def unbounded(steps: Sequence[AnyStep], value: Chain, dtype: data_type, number: Known) -> Chain:
    """The value before it is bounded, where the bounds are not within those of a type in which it is written, and
    before it is rounded to a whole number, where that type has no others.

    dtype: one to whose ends conversion takes what is beyond them, and infinities.
    """
    while before := _beyond(steps[value.index], dtype, number):
        value = before
    return value


def _beyond(step: AnyStep, dtype: data_type, number: Known) -> Chain | None:
    """The operand of a step that does nothing to what is converted to a type."""
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
"""Whether a bound is none for what is between `least` and `most`."""
