"""A value or a bound, chosen by comparing the two, is the larger or the smaller of them."""

from collections.abc import Callable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Operand, Step

_LARGER = {"cmp_lt": "max", "cmp_gt": "min"}


def clamped(steps: Sequence[AnyStep], number: Callable[[Operand], float | None]) -> list[AnyStep]:
    """The steps. Comparisons may have no readers left. number: the value of an operand, if it is known.

    Zeros have signs, which comparing does not see, and NaN as a bound is never chosen by it: these are left.
    """
    return [_bounded(steps, step, number) or step for step in steps]


def _bounded(steps: Sequence[AnyStep], step: AnyStep, number: Callable[[Operand], float | None]) -> Step | None:
    if step.op_name != "binary_select":
        return None
    chosen = dict(step.operands)
    bound, value, mask = chosen["input0"], chosen["input1"], chosen["mask"]
    compared = steps[mask.index] if isinstance(mask, Chain) else None
    if compared is None or compared.op_name not in _LARGER or (known := number(bound)) is None:
        return None
    _, (_, other) = compared.operands
    if (compared.operands[0][1], number(other)) != (value, known) or known == 0 or known != known:
        return None
    return Step(_LARGER[compared.op_name], (("input0", bound), ("input1", value)), (), step.rounded)
