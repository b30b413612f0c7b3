"""Simplification of roundings: some are merged into other steps, others are marked as exact or as cheap."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS
from graphfuse.rows.program import SWAP
from graphfuse.rows.steps import AnyStep, Chain, Operand, Rewrite, Step, renamed

_BITS = {data_type.BFLOAT16: 8, data_type.HALF: 11}
"""Bits of the significand."""
_LEAST_NORMAL = 2.0**-14


def roundings_joined(steps: Sequence[AnyStep], read: Iterable[Operand]) -> Rewrite:
    """The steps with roundings merged into the steps that compute their operands, if nothing else reads these; None if
    there are none. read: values that stores and sums read."""
    readers = Counter([*(o for step in steps for _, o in step.operands), *read])
    made: list[AnyStep] = []
    renames: dict[Operand, Operand] = {}
    for k, step in enumerate(steps):
        (_, value), *_ = step.operands
        before = made[renames[value].index] if isinstance(value, Chain) and readers[value] == 1 else None
        rounds = isinstance(step, Step) and step.op_name == "identity" and step.rounded is not None
        if rounds and isinstance(before, Step) and before.op_name in OPS and before.rounded is None:
            made[renames[value].index] = replace(before, rounded=step.rounded)
            renames[Chain(k)] = renames[value]
        else:
            made.append(renamed(step, renames))
            renames[Chain(k)] = Chain(len(made) - 1)
    return (tuple(made), renames) if len(made) < len(steps) else None


TypeOf = Callable[[Operand], data_type | float | None]
"""Function that returns the value of an operand, if known, else its type. For operands that no step computes."""


def marked(steps: Sequence[AnyStep], type_of: TypeOf, written: Mapping[Operand, data_type]) -> list[AnyStep]:
    """The steps with `exact` and `narrow` set. written: types of values that are only stored, once. Their step rounds
    to this type if its operands have the type and its op has a cheaper form for it."""
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
    """True if the value of an operand is known to be representable in a type."""
    if isinstance(o, Chain):
        step = steps[o.index]
        return step.rounded is dtype or step.rounded is None and _chosen(steps, step, dtype, type_of)
    known = type_of(o)
    return is_exact(known, dtype) if isinstance(known, float) else known is dtype


def _chosen(steps: Sequence[AnyStep], step: AnyStep, dtype: data_type, type_of: TypeOf) -> bool:
    """True if a step returns one of several values of a type, perhaps with another sign."""
    chosen = [o for port, o in step.operands if step.op_name in OPS and port in OPS[step.op_name].chooses]
    chosen += [o for _, o in step.operands if step.op_name == SWAP]
    return bool(chosen) and all(has_type(steps, o, dtype, type_of) for o in chosen)


def is_exact(value: float, dtype: data_type) -> bool:
    """True if a type is known to represent a number."""
    if dtype not in _BITS or not (value == 0 or _LEAST_NORMAL <= abs(value) <= dtype.facts.max):
        return False
    return math.ldexp(math.frexp(value)[0], _BITS[dtype]).is_integer()
