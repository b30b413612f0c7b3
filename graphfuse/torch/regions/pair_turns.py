"""Rotations of column pairs by 90 degrees (turns), as models write them: (-second half, first half), or, for
neighbours, (-second, first) of each two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from graphfuse.torch.analysis.meaning import (
    arguments,
    called_name,
    concatenated,
    is_last,
    is_op,
    same,
    slice_of_last_dim,
    value,
)

_WITHIN = frozenset({"stack", "unbind", "select", "getitem"})
"""Names of operations within a turn, in addition to slices, views and negations."""
_DEEPEST = 5
"""Nodes at most between an operation within a turn and the result of the turn."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A rotation of pairs by 90 degrees. source: the tensor that is rotated. inner: the nodes in between, which nothing
    else reads. interleaved: whether pairs are neighbours."""

    source: Node
    inner: frozenset[Node]
    interleaved: bool


def turn_of(node: object) -> Turn | None:
    """The turn whose result a node is; None for any other node."""
    found = _turn(concatenated(node), _half_column)
    if found is None and (viewed := is_op(node, "view")):
        found = _turn(stacked_tensors(viewed.args[0]), pair_column, viewed.args[0])
        if found is not None and not are_of_one_shape(node, found.source):
            return None
    if found is None or not all(found.inner.union((node,)).issuperset(n.users) for n in found.inner):
        return None
    return found


def source_of_turn_around(node: Node) -> Node | None:
    """Source of the turn that a node is within; None if it is in none."""
    ends, seen = [node], set[Node]()
    for _ in range(_DEEPEST + 1):
        ends = [user for end in ends if _is_within(end) for user in end.users if user not in seen]
        seen.update(ends)
        for end in ends:
            if (found := turn_of(end)) is not None and node in found.inner:
                return found.source
    return None


def _is_within(node: Node) -> bool:
    return is_op(node, "slice", "view", "neg") is not None or called_name(node) in _WITHIN


def _turn(parts: Sequence[Node], column_of: Callable[[object], PairColumn | None], *viewed: Node) -> Turn | None:
    """The turn with these parts side by side; None if they are none. column_of: finds the column of each pair that a
    node has. viewed: the node that stacks the parts."""
    negated = is_op(parts[0], "neg") if len(parts) == 2 else None
    second, first = (column_of(negated.get(0, "input")), column_of(parts[1])) if negated else (None, None)
    if not second or not first or second.source is not first.source or (second.number, first.number) != (1, 0):
        return None
    return Turn(second.source, frozenset((*viewed, parts[0], *second.nodes, *first.nodes)), bool(viewed))


def are_of_one_shape(a: Node, b: Node) -> bool:
    one, other = value(a), value(b)
    return one.dim() == other.dim() and all(map(same, one.shape, other.shape))


def stacked_tensors(node: object) -> tuple[Node, ...]:
    """Tensors that a node stacks along a new last dimension; none for any other node."""
    if not isinstance(node, Node) or called_name(node) != "stack":
        return ()
    given = arguments(node, "tensors", "dim")
    return tuple(given["tensors"]) if is_last(given.get("dim", 0), node) else ()


@dataclass(frozen=True, eq=False)
class PairColumn:
    """One column of each pair. source: the rows. number: 0 or 1. nodes: the nodes that select it."""

    source: Node
    number: int
    nodes: tuple[Node, ...]


def pair_column(node: object) -> PairColumn | None:
    """The column of neighbouring pairs that a node selects: every second one of a source, or one of two along the
    dimension of pairs in a view. None for any other node."""
    found = slice_of_last_dim(node)
    if found is not None and isinstance(value(found[0]).shape[-1], int):
        source, part = found
        columns, start = value(source).shape[-1], part.start or 0
        is_second = part.step == 2 and start in (0, 1) and (part.stop is None or part.stop >= columns - 1 + start)
        return PairColumn(source, start, (node,)) if is_second and not columns % 2 else None
    pairs, number, nodes = _element_of_last_dim(node) or (None, 0, ())
    of, made = is_op(pairs, "view"), value(pairs)
    rows = value(of.args[0]) if of else None
    if rows is None or not isinstance(rows.shape[-1], int) or made.dim() != rows.dim() + 1 or made.shape[-1] != 2:
        return None
    is_divided = same(made.shape[-2], rows.shape[-1] // 2) and all(map(same, made.shape[:-2], rows.shape[:-1]))
    return PairColumn(of.args[0], number, (node, *nodes, pairs)) if is_divided else None


def _element_of_last_dim(node: object) -> tuple[Node, int, tuple[Node, ...]] | None:
    """Tensor of which a node selects one of two elements along the last dimension, the element's number, and the nodes
    in between; None for any other node."""
    if not isinstance(node, Node) or called_name(node) not in ("getitem", "select"):
        return None
    pairs, way = node.args[0], ()
    if called_name(node) == "select":
        given = arguments(node, "input", "dim", "index")
        dim, number = given.get("dim"), given.get("index")
    elif called_name(pairs) == "unbind":
        given, number, way = arguments(pairs, "input", "dim"), node.args[1], (pairs,)
        pairs, dim = pairs.args[0], given.get("dim", 0)
    else:
        dim, index = -1, node.args[1]
        number = index[1] if index in ((Ellipsis, 0), (Ellipsis, 1)) else None
    return (pairs, number, way) if number in (0, 1) and is_last(dim, pairs) else None


def _half_column(node: object) -> PairColumn | None:
    """The half of a source along the last dimension that a node selects. A pair has one column in each half."""
    found = slice_of_last_dim(node)
    if found is None or value(node) is None or not isinstance(value(found[0]).shape[-1], int):
        return None
    source, part = found
    columns, start = value(source).shape[-1], part.start or 0
    is_half = not columns % 2 and value(node).shape[-1] == columns // 2 and part.step in (None, 1)
    return PairColumn(source, int(start > 0), (node,)) if is_half and start in (0, columns // 2) else None
