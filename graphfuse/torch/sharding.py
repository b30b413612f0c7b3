"""Rules of how the operators of ``graphfuse.torch`` and ``graphfuse.functional`` run on DTensors.

Users need not call anything. Rules are registered once a program has both operators and DTensors: at an import, the
construction of a module or a call. docs/sharding.md is for users.
"""

from dataclasses import dataclass

from graphfuse.functional import sharding
from graphfuse.functional.axes import axes
from graphfuse.functional.declaration import Function
from graphfuse.functional.operator import FUNCTIONS
from graphfuse.functional.sharding import register, splittable

__all__ = ["OperatorRule", "register", "rules"]

_SHAPE = (2, 3, 512)  # samples, rows of each, columns
_HEADS = 4  # of a row that covers all heads


@dataclass(frozen=True)
class OperatorRule:
    """Rule of an operator whose first tensor, (samples, ..., columns), is split.

    name: without ``graphfuse::``. rows: whether it can be split along all dimensions but those of a row: the last one,
    or also that of heads. whole: arguments that every rank has completely. by_sample: arguments that are split along
    the first dimension only. added: results of which each rank has the part of its rows, with the operation that
    combines them. columns: whether the tensor can be split along the last dimension.
    """

    name: str
    rows: bool
    whole: tuple[str, ...]
    by_sample: tuple[str, ...]
    added: tuple[tuple[str, str], ...]
    columns: bool


def rules() -> tuple[OperatorRule, ...]:
    """Rules of all operators, for three dimensions and the default options."""
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
