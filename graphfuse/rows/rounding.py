"""Roundings that are steps of their own, those that change nothing, and steps whose operands have the type already."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS
from graphfuse.rows.program import SWAP
from graphfuse.rows.steps import AnyStep, Chain, Operand, Shorter, Step, renamed

_BITS = {data_type.BFLOAT16: 8, data_type.HALF: 11}
"""Bits of a significand."""
_LEAST_NORMAL = 2.0**-14


def roundings_joined(steps: Sequence[AnyStep], read: Iterable[Operand]) -> Shorter:
    """The steps. One that only rounds what nobody else reads is joined to the step that makes it. read: values that are
    read beside the steps."""
    readers = Counter([*(o for step in steps for _, o in step.operands), *read])
    made: list[AnyStep] = []
    moved: dict[Operand, Operand] = {}
    for k, step in enumerate(steps):
        (_, value), *_ = step.operands
        before = made[moved[value].index] if isinstance(value, Chain) and readers[value] == 1 else None
        rounds = isinstance(step, Step) and step.op_name == "identity" and step.rounded is not None
        if rounds and isinstance(before, Step) and before.op_name in OPS and before.rounded is None:
            made[moved[value].index] = replace(before, rounded=step.rounded)
            moved[Chain(k)] = moved[value]
        else:
            made.append(renamed(step, moved))
            moved[Chain(k)] = Chain(len(made) - 1)
    return (tuple(made), moved) if len(made) < len(steps) else None


TypeOf = Callable[[Operand], data_type | float | None]
"""Of what no step makes its type, or value if known."""


def marked(steps: Sequence[AnyStep], type_of: TypeOf, written: Mapping[Operand, data_type]) -> list[AnyStep]:
    """The steps, marked with what is found. written: types of values of which all that is seen is how they are written:
    a step rounds to it if it computes with such values, and there are cheaper forms of that."""
    made: list[AnyStep] = []
    for k, step in enumerate(steps):
        dtype = step.rounded if isinstance(step, Step) else None
        if dtype is None and step.op_name in OPS and (OPS[step.op_name].narrow or OPS[step.op_name].packed):
            dtype = written.get(Chain(k))
        if dtype is not None:
            narrow = all(has_type(made, o, dtype, type_of) for _, o in step.operands)
            if narrow or step.rounded:
                step = replace(step, rounded=dtype, exact=_chosen(made, step, dtype, type_of), narrow=narrow)
        made.append(step)
    return made


def has_type(steps: Sequence[AnyStep], o: Operand, dtype: data_type, type_of: TypeOf) -> bool:
    """True if a type has the value of an operand."""
    if isinstance(o, Chain):
        step = steps[o.index]
        return step.rounded is dtype or step.rounded is None and _chosen(steps, step, dtype, type_of)
    known = type_of(o)
    return is_exact(known, dtype) if isinstance(known, float) else known is dtype


def _chosen(steps: Sequence[AnyStep], step: AnyStep, dtype: data_type, type_of: TypeOf) -> bool:
    """True if a step chooses among values of a type, which may change their signs."""
    chosen = [o for port, o in step.operands if step.op_name in OPS and port in OPS[step.op_name].chooses]
    chosen += [o for _, o in step.operands if step.op_name == SWAP]
    return bool(chosen) and all(has_type(steps, o, dtype, type_of) for o in chosen)


def is_exact(value: float, dtype: data_type) -> bool:
    """True if a type is known to have a number."""
    if dtype not in _BITS or not (value == 0 or _LEAST_NORMAL <= abs(value) <= dtype.facts.max):
        return False
    return math.ldexp(math.frexp(value)[0], _BITS[dtype]).is_integer()
