"""Rotations of neighbouring columns that a graph computes one column of each pair at a time, rewritten in the form that
regions know: rows times cosines, plus pairs rotated by 90 degrees times sines. Values stay the same, bit for bit.

Models write both columns into a new tensor, each as every second element of it (WAN), or stack them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.fx import Graph, Node

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import (
    called_name,
    column_of_pairs,
    dtype,
    hint,
    is_changed,
    is_op,
    operands,
    same,
    value,
    without_casts,
)
from graphfuse.torch.analysis.new_nodes import insert
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.regions.pair_turns import are_of_one_shape, pair_column, stacked_tensors
from graphfuse.torch.regions.replace import erase_unread

_MOST = 24
"""Nodes at most that are visited in search of a reduction of the rotated rows."""
_aten = torch.ops.aten


def write_turns(graph: Graph) -> None:
    """Rewrites rotations after reductions of their rows as sums of two products, if cosines and sines are smaller than
    rows."""
    doubled = dict[object, Node]()
    for node in [*graph.nodes]:
        writes, viewed = _filling(node), is_op(node, "view")
        columns = [write.args[2] for write in writes] or (stacked_tensors(viewed.args[0]) if viewed else ())
        found = _rotation(*columns) if len(columns) == 2 else None
        if found is None or not are_of_one_shape(node, found.source) or not _is_behind_reduction(found.source):
            continue
        made = found.put(graph, node, max(writes, default=node), doubled)
        node.replace_all_uses_with(made, lambda user, writes=writes: user not in writes)
        for write in writes:
            graph.erase_node(write)
    if doubled:
        erase_unread(graph)


def _filling(node: Node) -> Sequence[Node]:
    """Writes of the even-numbered and the odd-numbered columns, which fill an empty tensor before it is read; none for
    any other node."""
    if called_name(node) not in ("empty_like", "new_empty", "empty") or value(node) is None:
        return ()
    writes = [user for user in node.users if user.target is operator.setitem and user.args[0] is node]
    if len(writes) != 2 or any(write.users or not isinstance(write.args[2], Node) for write in writes):
        return ()
    if sorted(node.users)[:2] != writes:
        return ()
    by_place = {column_of_pairs(write.args[1], value(node).dim()): write for write in writes}
    return (by_place[0], by_place[1]) if by_place.keys() == {0, 1} else ()


@dataclass(frozen=True, eq=False)
class _Rotation:
    """A rotation: source * cos + (source with pairs rotated by 90 degrees) * sin. cos and sin have one column for each
    pair. wide: the type in which the source is multiplied."""

    source: Node
    wide: torch.dtype
    cos: Node
    sin: Node

    def put(self, graph: Graph, node: Node, before: Node, doubled: dict[object, Node]) -> Node:
        """Node of the rotation, in the type of `node`. doubled: receives cosines and sines with a column for each of
        the source, one node for all that are the same part of a tensor."""
        for angle in (self.cos, self.sin):
            if _part(angle) not in doubled:
                with graph.inserting_before(angle.next):
                    doubled[_part(angle)] = _side_by_side(graph, angle, angle)
        with graph.inserting_before(before):
            x = _cast(graph, self.source, self.wide)
            first, second = (insert(graph, _aten.slice.Tensor, x, -1, start, sys.maxsize, 2) for start in (0, 1))
            turn = _side_by_side(graph, insert(graph, _aten.neg.default, second), first)
            pairs = ((x, self.cos), (turn, self.sin))
            one, two = (insert(graph, _aten.mul.Tensor, a, doubled[_part(b)]) for a, b in pairs)
            return _cast(graph, insert(graph, _aten.add.Tensor, one, two), dtype(node))


def _part(angle: Node) -> object:
    """Key that equal parts of a tensor share; for any other node the node itself."""
    is_part = is_op(angle, "slice", "view") is not None and not is_changed(angle)
    return (angle.target, str(angle.args), str(angle.kwargs)) if is_part else angle


def _side_by_side(graph: Graph, a: Node, b: Node) -> Node:
    return insert(graph, _aten.flatten.using_ints, insert(graph, _aten.stack.default, [a, b], -1), -2, -1)


def _cast(graph: Graph, node: Node, kind: torch.dtype) -> Node:
    return node if dtype(node) is kind else insert(graph, _aten.to.dtype, node, kind)


@dataclass(frozen=True, eq=False)
class _Product:
    """One column of each pair of a source, times angles. wide: the type in which they are multiplied."""

    source: Node
    wide: torch.dtype
    angle: Node


def _rotation(even: Node, odd: Node) -> _Rotation | None:
    """The rotation whose even-numbered and odd-numbered columns two nodes have: x cos - y sin, and x sin + y cos. None
    if they have no such columns."""
    less, more = is_op(even, "sub"), is_op(odd, "add")
    if less is None or more is None or dtype(even) is not dtype(odd):
        return None
    x, y = (_product(less.get(*one), n) for n, one in enumerate(((0, "input"), (1, "other"))))
    for a, b in operands(more):
        other_x, other_y = _product(a, 0), _product(b, 1)
        found = (x, y, other_x, other_y)
        if None in found or len({(p.source, p.wide) for p in found}) > 1:
            continue
        if x.angle is other_y.angle and y.angle is other_x.angle and _is_small(x.angle, y.angle, x.source):
            return _Rotation(x.source, x.wide, x.angle, y.angle)
    return None


def _product(node: object, number: int) -> _Product | None:
    """Product of the columns with this number in each pair and angles; None for any other node."""
    found = is_op(node, "mul")
    for column, angle in operands(found) if found else ():
        of = pair_column(without_casts(column))
        if of is not None and of.number == number and isinstance(angle, Node) and value(angle) is not None:
            return _Product(of.source, dtype(column), angle)
    return None


def _is_small(cos: Node, sin: Node, source: Node) -> bool:
    """True for angles that have one value for each pair, and fewer rows than the source."""
    pairs = value(source).shape[-1] // 2
    angles = [value(angle) for angle in (cos, sin)]
    return all(
        t.dim() and same(t.shape[-1], pairs) and hint(t.numel()) * 2 < hint(value(source).numel()) for t in angles
    )


def _is_behind_reduction(node: Node) -> bool:
    """True if a node is computed from a reduction by operations that inductor generates kernels for."""
    found = reachable([node], lambda one: one.all_input_nodes if inductor.is_fused(one) else ())
    return any(map(inductor.is_reduction, islice(found, _MOST)))
