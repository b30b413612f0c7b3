"""Replacement of divisions of a row, or of a part of one, by one value: by its reciprocal, with the same bits.

If dividends are of 16 bits and quotients are stored as FP8, a cheaper form has a reciprocal in two parts.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from graphfuse.base.dtypes import SIXTEEN_BITS, data_type
from graphfuse.rows.program import BELOW, DIVISOR, NARROW_QUOTIENT, QUOTIENT, REST, of_parts
from graphfuse.rows.rounding import TypeOf, has_type
from graphfuse.rows.steps import AnyStep, Chain, Number, Operand, Rewrite, Step, renamed


def divided(
    steps: Sequence[AnyStep],
    read: Iterable[Operand],
    has_columns: Callable[[Operand], bool],
    type_of: TypeOf,
    as_fp8: AbstractSet[Chain],
) -> Rewrite:
    """The steps with reciprocals; None if nothing is divided.

    read: values that stores and sums read. has_columns: whether an operand varies along a row. as_fp8: values that are
    stored as FP8.
    """
    if all(step.op_name != "div" for step in steps):
        return None
    made: list[AnyStep] = []
    renames: dict[Operand, Operand] = {}
    reciprocals: dict[AnyStep, Operand] = {}
    shared = of_parts(steps, has_columns)
    readers = Counter([*(o for step in steps for _, o in step.operands), *read])

    def is_one(o: Operand) -> bool:
        return o in shared or not has_columns(o)

    def once(name: str, **operands: Operand) -> Operand:
        step = Step(name, tuple(operands.items()))
        if step not in reciprocals:
            made.append(step)
            reciprocals[step] = Chain(len(made) - 1)
        return reciprocals[step]

    def is_narrow(k: int, dividend: Operand) -> bool:
        only_written = Chain(k) in as_fp8 and readers[Chain(k)] == 1
        few = any(has_type(steps, dividend, dtype, type_of) for dtype in SIXTEEN_BITS)
        return only_written and few and steps[k].rounded in (None, data_type.BFLOAT16)

    for k, old in enumerate(steps):
        step = renamed(old, renames)
        alone = [is_one(o) for _, o in old.operands]
        if isinstance(step, Step) and step.op_name == "div" and alone == [False, True]:
            (dividend, (_, divisor)), known = step.operands, type_of(old.operands[1][1])
            if reciprocal := _factor(step, known):
                step = replace(step, op_name="mul", operands=(dividend, ("b", Number(reciprocal))), narrow=False)
            elif is_narrow(k, old.operands[0][1]):
                below = once(BELOW, b=divisor)
                rest = once(REST, b=divisor, reciprocal=below)
                step = Step(NARROW_QUOTIENT, (*step.operands, ("reciprocal", below), ("rest", rest)), (), step.rounded)
            else:
                reciprocal = once(DIVISOR, b=divisor)
                step = Step(QUOTIENT, (*step.operands, ("reciprocal", reciprocal)), (), step.rounded)
        made.append(step)
        renames[Chain(k)] = Chain(len(made) - 1)
    return tuple(made), renames


def _factor(step: Step, divisor: data_type | float | None) -> float | None:
    """The number by which a step may multiply instead of dividing; None if there is none.

    The product with the reciprocal of a power of two is exactly the quotient. A quotient of bfloat16 numbers lies at
    least 2^-17, relative, from the next rounding boundary of bfloat16. The product with the reciprocal has a relative
    error of 2^-23, or, for quotients that are not normal, rounds as the quotient does.
    """
    if not isinstance(divisor, float) or not 2**-62 <= abs(divisor) <= 2**62:
        return None
    is_power = abs(math.frexp(divisor)[0]) == 0.5
    narrow = step.narrow and step.rounded is data_type.BFLOAT16 and abs(divisor) <= 2**23
    return 1 / divisor if is_power or narrow else None
