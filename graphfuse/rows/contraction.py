"""Contraction of the mean of a row plus one value, such as epsilon, to one fused multiply-add.

With it, a norm written as nodes computes the same as the op ``rmsnorm``. A mean that is rounded to a type, or read
elsewhere, is not contracted; neither are sums with other products.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Load, Number, Operand, Reduce, Rewrite, Step, operands_of, renamed


def contracted(steps: Sequence[AnyStep], read: Iterable[Operand]) -> Rewrite:
    """The steps with contracted ones; None if there are none. read: values that stores and sums read."""
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
    renames: dict[Operand, Operand] = {Chain(old): Chain(new) for new, old in enumerate(made)}
    return tuple(renamed(step, renames) for step in made.values()), renames


def factors(
    steps: Sequence[AnyStep], summed: tuple[Operand, ...], has_columns: Callable[[Operand], bool]
) -> tuple[Operand, ...]:
    """The operands of a sum over rows: the two factors if a product is summed, for a multiply-add; else `summed`."""
    (value, *others) = summed
    found = () if others else tuple(operands_of(steps, value, "mul").values())
    return found if found and all(isinstance(o, Chain | Load) and has_columns(o) for o in found) else summed
