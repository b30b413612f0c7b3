"""Contracts the mean of a row plus one value, such as epsilon, to one operation that is rounded once.

So a norm written as nodes computes what the op ``rmsnorm`` does. A mean that is rounded to a type, or read elsewhere,
is not contracted, and neither are other products that are added.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Load, Number, Operand, Reduce, Shorter, Step, operands_of, renamed


def contracted(steps: Sequence[AnyStep], read: Iterable[Operand]) -> Shorter:
    """Fewer steps. read: values that are read beside the steps."""
    readers = Counter(o for step in steps for _, o in step.operands)
    readers.update(read)
    one_a_row = {Chain(k) for k, step in enumerate(steps) if isinstance(step, Reduce)}
    made: dict[int, AnyStep] = {}
    for k, step in enumerate(steps):
        made[k] = step
        if step.op_name != "add":
            continue
        (_, a), (_, b) = step.operands
        for mean, other in ((a, b), (b, a)):
            total, factor = operands_of(steps, mean, "mul").values() or (None, None)
            divides = total in one_a_row and isinstance(factor, Number)
            if divides and readers[mean] == 1 and not isinstance(other, Chain):
                del made[mean.index]
                made[k] = Step("fma", (("a", total), ("b", factor), ("c", other)), (), step.rounded)
                break
    if len(made) == len(steps):
        return None
    moved: dict[Operand, Operand] = {Chain(old): Chain(new) for new, old in enumerate(made)}
    return tuple(renamed(step, moved) for step in made.values()), moved


def factors(
    steps: Sequence[AnyStep], summed: tuple[Operand, ...], has_columns: Callable[[Operand], bool]
) -> tuple[Operand, ...]:
    """The operands of a sum over rows; in place of a product its factors, which are multiplied as they are added."""
    (value, *others) = summed
    found = () if others else tuple(operands_of(steps, value, "mul").values())
    return found if found and all(isinstance(o, Chain | Load) and has_columns(o) for o in found) else summed
