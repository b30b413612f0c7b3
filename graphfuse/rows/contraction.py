"""Products that are added without being rounded, so that a norm written as nodes computes what the op ``rmsnorm`` does.

They are two: a mean of a row to which one value is added, as epsilon is, and what is scaled and shifted column by
column. Others stay as the graph has them. A product that is rounded to a type, or read elsewhere, stays too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from graphfuse.rows.program import Extent
from graphfuse.rows.steps import Chain, Number, Operand, Reduce, Step

_FUSED = {"add": ("fma", "fma"), "sub": ("fms", "fnma")}
"""By the op, what takes its place if its first term is a product, and if its second one is."""


def contracted(
    steps: Sequence[Step | Reduce], extent: Callable[[Operand], Extent], read: Iterable[Operand]
) -> tuple[tuple[Step | Reduce, ...], dict[Operand, Operand]]:
    """The steps, and by the old values the new ones. read: values that are read beside the steps."""
    readers = Counter(o for step in steps for _, o in step.operands)
    readers.update(read)
    made: dict[int, Step | Reduce] = {}
    for k, step in enumerate(steps):
        made[k] = step
        for product, name, other in _terms(step, steps):
            _, factor = operands = [o for _, o in steps[product.index].operands]
            of_columns = all(extent(o) == Extent(rows=False, columns=True) for o in (factor, other))
            of_a_mean = isinstance(factor, Number) and not extent(Chain(k)).columns
            if readers[product] == 1 and (of_a_mean or of_columns):
                del made[product.index]
                made[k] = Step(name, tuple(zip("abc", (*operands, other), strict=True)), (), step.rounded)
                break
    moved: dict[Operand, Operand] = {Chain(old): Chain(new) for new, old in enumerate(made)}
    return tuple(_renamed(step, moved) for step in made.values()), moved


def _terms(step: Step | Reduce, steps: Sequence[Step | Reduce]) -> Iterator[tuple[Chain, str, Operand]]:
    """(product, what takes the step's place, the other term) for each term of a sum or difference that is a product."""
    if step.op_name in _FUSED:
        (_, a), (_, b) = step.operands
        for term, name, other in zip((a, b), _FUSED[step.op_name], (b, a), strict=True):
            made = steps[term.index] if isinstance(term, Chain) else None
            if made is not None and made.op_name in ("mul", "scale") and made.rounded is None:
                yield term, name, other


def _renamed(step: Step | Reduce, moved: dict[Operand, Operand]) -> Step | Reduce:
    if isinstance(step, Reduce):
        return replace(step, input=moved.get(step.input, step.input))
    return replace(step, operands=tuple((port, moved.get(o, o)) for port, o in step.operands))
