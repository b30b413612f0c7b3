"""Divides the elements of a row, or of a part of one, by one value: by its reciprocal, made once, to the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.rows.program import DIVISOR, QUOTIENT, of_parts
from graphfuse.rows.steps import AnyStep, Chain, Number, Operand, Step, renamed


def divided(
    steps: Sequence[AnyStep], has_columns: Callable[[Operand], bool], number: Callable[[Operand], float | None]
) -> tuple[tuple[AnyStep, ...], dict[Operand, Operand]]:
    """The steps, and by the old values the new ones. has_columns: whether an operand varies along a row. number: the
    value of an operand, if it is known.
    """
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
            (dividend, (_, divisor)) = step.operands
            if reciprocal := _factor(step, number(divisor)):
                step = replace(step, op_name="mul", operands=(dividend, ("b", Number(reciprocal))), narrow=False)
            else:
                if divisor not in reciprocals:
                    made.append(Step(DIVISOR, (("b", divisor),)))
                    reciprocals[divisor] = Chain(len(made) - 1)
                step = Step(QUOTIENT, (*step.operands, ("reciprocal", reciprocals[divisor])), (), step.rounded)
        made.append(step)
        moved[Chain(k)] = Chain(len(made) - 1)
    return tuple(made), moved


def _factor(step: Step, divisor: float | None) -> float | None:
    """The number that a step may multiply by instead of dividing, if there is one.

    A quotient of bfloat16 numbers is 2^-17 of itself or more from where its rounding to bfloat16 changes; the product
    with the reciprocal is 2^-23 off, or rounded as the quotient is, where that is no normal number.
    """
    if divisor is None or not (step.narrow and step.rounded is data_type.BFLOAT16 and 2**-62 <= abs(divisor) <= 2**23):
        return None
    return 1 / divisor
