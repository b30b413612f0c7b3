"""Removal of steps whose results are not read, such as those of an op's unused output."""

from collections.abc import Iterable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Operand, Rewrite, renamed


def pruned(steps: Sequence[AnyStep], read: Iterable[Operand]) -> Rewrite:
    """The steps that are needed; None if all are. read: values that stores and sums read."""
    wanted = set(read)
    for k in reversed(range(len(steps))):
        if Chain(k) in wanted:
            wanted.update(o for _, o in steps[k].operands)
    kept = [k for k in range(len(steps)) if Chain(k) in wanted]
    if len(kept) == len(steps):
        return None
    renames: dict[Operand, Operand] = {Chain(old): Chain(new) for new, old in enumerate(kept)}
    return tuple(renamed(steps[k], renames) for k in kept), renames
