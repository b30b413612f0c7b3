"""Drops steps whose results nobody reads, such as those of an op's unused output."""

from collections.abc import Iterable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Operand, renamed


def pruned(steps: Sequence[AnyStep], read: Iterable[Operand]) -> tuple[tuple[AnyStep, ...], dict[Operand, Operand]]:
    """The other steps, and by the old values the new ones. read: values that are read beside the steps."""
    wanted = set(read)
    for k in reversed(range(len(steps))):
        if Chain(k) in wanted:
            wanted.update(o for _, o in steps[k].operands)
    kept = [k for k in range(len(steps)) if Chain(k) in wanted]
    if len(kept) == len(steps):
        return tuple(steps), {value: value for value in map(Chain, kept)}
    moved: dict[Operand, Operand] = {Chain(old): Chain(new) for new, old in enumerate(kept)}
    return tuple(renamed(steps[k], moved) for k in kept), moved
