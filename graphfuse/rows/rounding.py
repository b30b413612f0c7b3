"""Finds steps whose operands all have the type that the result is rounded to, and roundings that change nothing: of what
is one of these operands."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS
from graphfuse.rows.steps import AnyStep, Chain, Operand, Step

_BITS = {data_type.BFLOAT16: 8, data_type.HALF: 11}
"""Bits of a significand."""
_LEAST_NORMAL = 2.0**-14


def marked(steps: Sequence[AnyStep], type_of: Callable[[Operand], data_type | float | None]) -> list[AnyStep]:
    """The steps, marked with what is found. type_of: of what no step makes its type, or value if known."""
    made: list[AnyStep] = []

    def has(o: Operand, dtype: data_type) -> bool:
        if isinstance(o, Chain):
            step = made[o.index]
            return step.rounded is dtype or step.rounded is None and chosen(step, dtype)
        known = type_of(o)
        return _is_exact(known, dtype) if isinstance(known, float) else known is dtype

    def chosen(step: AnyStep, dtype: data_type) -> bool:
        ports = OPS[step.op_name].chooses if step.op_name in OPS else ()
        return bool(ports) and all(has(o, dtype) for port, o in step.operands if port in ports)

    for step in steps:
        dtype = step.rounded if isinstance(step, Step) else None
        if dtype is not None:
            step = replace(step, exact=chosen(step, dtype), narrow=all(has(o, dtype) for _, o in step.operands))
        made.append(step)
    return made


def _is_exact(value: float, dtype: data_type) -> bool:
    """True if a type is known to have a number."""
    if dtype not in _BITS or not (value == 0 or _LEAST_NORMAL <= abs(value) <= dtype.facts.max):
        return False
    return math.ldexp(math.frexp(value)[0], _BITS[dtype]).is_integer()
