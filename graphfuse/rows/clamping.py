"""A value or a bound, chosen by comparing the two, is the larger or the smaller of them; bounds that a type has."""

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


def unbounded(
    steps: Sequence[AnyStep], value: Chain, largest: float, number: Callable[[Operand], float | None]
) -> Chain:
    """The value before it is bounded, where the bounds are not within those of a type in which it is written.

    largest: of the type, which what is larger becomes, and infinity.
    """
    while beyond := _beyond(steps[value.index], largest, number):
        value = beyond
    return value


def _beyond(step: AnyStep, largest: float, number: Callable[[Operand], float | None]) -> Chain | None:
    """The operand of a step that does nothing to what is bounded by `largest`."""
    if not isinstance(step, Step) or step.rounded is not None and not step.exact:
        return None
    operands = [o for _, o in step.operands]
    if step.op_name in _BEYOND:
        beyond = _BEYOND[step.op_name]
        operands = [o for o in operands if (known := number(o)) is None or not beyond(known, largest)]
    elif step.op_name != "identity":
        return None
    return operands[0] if len(operands) == 1 and isinstance(operands[0], Chain) else None


_BEYOND = {"max": lambda bound, largest: bound <= -largest, "min": lambda bound, largest: bound >= largest}
"""Whether a bound is none for what is bounded by `largest`."""
