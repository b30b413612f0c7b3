"""Contracts the mean of a row plus one value, such as epsilon, to one operation that is rounded once.

So a norm written as nodes computes what the op ``rmsnorm`` does. A mean that is rounded to a type, or read elsewhere,
is not contracted, and neither are other products that are added.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Load, Number, Operand, Reduce, Step, renamed


def contracted(steps: Sequence[AnyStep], read: Iterable[Operand]) -> tuple[tuple[AnyStep, ...], dict[Operand, Operand]]:
    """The steps, and by the old values the new ones. read: values that are read beside the steps."""
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
            total = _total(steps, mean)
            if total in one_a_row and readers[mean] == 1 and not isinstance(other, Chain):
                _, (_, factor) = steps[mean.index].operands
                del made[mean.index]
                made[k] = Step("fma", (("a", total), ("b", factor), ("c", other)), (), step.rounded)
                break
    moved: dict[Operand, Operand] = {Chain(old): Chain(new) for new, old in enumerate(made)}
    return tuple(renamed(step, moved) for step in made.values()), moved


def factors(
    steps: Sequence[AnyStep], summed: tuple[Operand, ...], has_columns: Callable[[Operand], bool]
) -> tuple[Operand, ...]:
    """The operands of a sum over rows; in place of a product its factors, which are multiplied as they are added."""
    (value, *others) = summed
    step = steps[value.index] if isinstance(value, Chain) and not others else None
    if step is None or step.op_name != "mul" or step.rounded is not None:
        return summed
    found = tuple(o for _, o in step.operands)
    return found if all(isinstance(o, Chain | Load) and has_columns(o) for o in found) else summed


def _total(steps: Sequence[AnyStep], mean: Operand) -> Operand | None:
    """The sum that is divided by the number of columns for a mean."""
    step = steps[mean.index] if isinstance(mean, Chain) else None
    if step is None or step.op_name != "mul" or step.rounded is not None:
        return None
    (_, total), (_, factor) = step.operands
    return total if isinstance(factor, Number) else None
