"""Divides the elements of a row by one value with a reciprocal that is made once, to the same bits."""

from collections.abc import Callable, Sequence

from graphfuse.rows.program import DIVISOR, QUOTIENT
from graphfuse.rows.steps import AnyStep, Chain, Operand, Step, renamed


def divided(
    steps: Sequence[AnyStep], has_columns: Callable[[Operand], bool]
) -> tuple[tuple[AnyStep, ...], dict[Operand, Operand]]:
    """The steps, and by the old values the new ones. has_columns: whether an operand varies along a row."""
    made: list[AnyStep] = []
    moved: dict[Operand, Operand] = {}
    reciprocals: dict[Operand, Operand] = {}
    for k, old in enumerate(steps):
        step = renamed(old, moved)
        if isinstance(step, Step) and step.op_name == "div":
            (_, a), (_, b) = old.operands
            if has_columns(a) and not has_columns(b):
                (_, divisor) = step.operands[1]
                if divisor not in reciprocals:
                    made.append(Step(DIVISOR, (("b", divisor),)))
                    reciprocals[divisor] = Chain(len(made) - 1)
                operands = (*step.operands, ("reciprocal", reciprocals[divisor]))
                step = Step(QUOTIENT, operands, (), step.rounded)
        made.append(step)
        moved[Chain(k)] = Chain(len(made) - 1)
    return tuple(made), moved
