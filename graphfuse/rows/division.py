"""Divides the elements of a row, or of a part of one, by one value: by its reciprocal, made once, to the same bits."""

from collections.abc import Callable, Sequence

from graphfuse.rows.program import DIVISOR, QUOTIENT, of_parts
from graphfuse.rows.steps import AnyStep, Chain, Operand, Step, renamed


def divided(
    steps: Sequence[AnyStep], has_columns: Callable[[Operand], bool]
) -> tuple[tuple[AnyStep, ...], dict[Operand, Operand]]:
    """The steps, and by the old values the new ones. has_columns: whether an operand varies along a row."""
    made: list[AnyStep] = []
    moved: dict[Operand, Operand] = {}
    reciprocals: dict[Operand, Operand] = {}
    shared = of_parts(steps, has_columns)

    def is_one(o: Operand) -> bool:
        return o in shared or not has_columns(o)

    for k, old in enumerate(steps):
        step = renamed(old, moved)
        alone = [is_one(o) for _, o in old.operands]
        if isinstance(step, Step) and step.op_name == "div" and alone == [False, True]:
            (_, divisor) = step.operands[1]
            if divisor not in reciprocals:
                made.append(Step(DIVISOR, (("b", divisor),)))
                reciprocals[divisor] = Chain(len(made) - 1)
            step = Step(QUOTIENT, (*step.operands, ("reciprocal", reciprocals[divisor])), (), step.rounded)
        made.append(step)
        moved[Chain(k)] = Chain(len(made) - 1)
    return tuple(made), moved
