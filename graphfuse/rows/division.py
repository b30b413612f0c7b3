"""Divides the elements of a row by one value with a reciprocal that is made once, to the same bits."""

from collections.abc import Callable, Sequence

from graphfuse.rows.program import DIVISOR, OF_PARTS, QUOTIENT
from graphfuse.rows.steps import AnyStep, Chain, Operand, Step, renamed


def divided(
    steps: Sequence[AnyStep], has_columns: Callable[[Operand], bool]
) -> tuple[tuple[AnyStep, ...], dict[Operand, Operand]]:
    """The steps, and by the old values the new ones. has_columns: whether an operand varies along a row."""
    made: list[AnyStep] = []
    moved: dict[Operand, Operand] = {}
    reciprocals: dict[Operand, Operand] = {}
    shared: set[Operand] = set()  # values that the elements of a part have together

    def is_one(o: Operand) -> bool:
        return o in shared or not has_columns(o)

    for k, old in enumerate(steps):
        operands = [o for _, o in old.operands]
        if old.op_name in OF_PARTS.values() or all(map(is_one, operands)):
            shared.add(Chain(k))
        step = renamed(old, moved)
        if isinstance(step, Step) and step.op_name == "div" and not is_one(operands[0]) and is_one(operands[1]):
            (_, divisor) = step.operands[1]
            if divisor not in reciprocals:
                made.append(Step(DIVISOR, (("b", divisor),)))
                reciprocals[divisor] = Chain(len(made) - 1)
            step = Step(QUOTIENT, (*step.operands, ("reciprocal", reciprocals[divisor])), (), step.rounded)
        made.append(step)
        moved[Chain(k)] = Chain(len(made) - 1)
    return tuple(made), moved
