"""Sharded models: how the operators of ``graphfuse.torch`` and ``graphfuse.functional`` run on DTensors.

Nothing has to be called: rules are registered as soon as a program has both, by an import, a module that is made or a
call. docs/sharding.md is for users.
"""

from dataclasses import dataclass

from graphfuse.functional import sharding
from graphfuse.functional.axes import axes
from graphfuse.functional.declaration import Function
from graphfuse.functional.operator import FUNCTIONS
from graphfuse.functional.sharding import register, splittable

__all__ = ["OperatorRule", "register", "rules"]

_SHAPE = (2, 3, 512)  # samples, rows of each, columns
_HEADS = 4  # of a row, where all of them are one


@dataclass(frozen=True)
class OperatorRule:
    """Rule of an operator whose first tensor, (samples, ..., columns), is split.

    name: without ``graphfuse::``. rows: whether it can be split along all dimensions but those of a row, the last one,
    or that of heads, too. whole: what every rank has all of. by_sample: what is split along the first dimension alone.
    added: results of which each rank has its rows' part, by the operation that makes the whole. columns: whether it can
    be split along the last one.
    """

    name: str
    rows: bool
    whole: tuple[str, ...]
    by_sample: tuple[str, ...]
    added: tuple[tuple[str, str], ...]
    columns: bool


def rules() -> tuple[OperatorRule, ...]:
    """Rules of all operators, of three dimensions and the default options."""
    return tuple(_rule(f) for f in FUNCTIONS.values())


def _rule(f: Function) -> OperatorRule:
    used = [a for a in f.arguments if a.only is None]
    shape = (*_SHAPE[:-1], *(_HEADS,) * (used[0].row_axes - 1), _SHAPE[-1])
    found = axes(used, {a.name: shape for a in used if a is used[0] or (a.free and not a.table)})
    rows = {*range(len(shape) - used[0].row_axes)}
    missing = {a: rows - {*found[a.name]} for a in used}
    added = tuple((a.name, a.over_rows) for a in used if a.over_rows is not None)
    read = [a for a in used if a.over_rows is None]
    return OperatorRule(
        f.name,
        {*splittable(used, found)} == rows,
        tuple(a.name for a in read if missing[a] == rows),
        tuple(a.name for a in read if missing[a] == rows - {0}),
        added,
        f.columns is not None,
    )


sharding.prepare()
