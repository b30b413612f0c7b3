"""Equal parts of rows that are treated as rows, such as the groups of a group norm: a graph views rows as groups, and
back."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import called_name, is_op, same, value
from graphfuse.torch.regions.pair_turns import source_of_turn_around, stacked_tensors

_OF_EXTENTS = frozenset({"view", "_unsafe_view", "reshape", "unflatten"})
"""Names of views that get all extents as arguments."""


@dataclass(frozen=True)
class Groups:
    """Equal parts of a row. columns: of each part. is_flat: whether the parts of all rows lie along one dimension.
    rows: then, the extents of the rows' dimensions."""

    count: int
    columns: int
    is_flat: bool = False
    rows: tuple[object, ...] = field(default=(), compare=False)

    def is_split(self, node: Node) -> bool:
        """True if a node views rows as groups."""
        return _viewed(node) == (self, True)

    def is_joined(self, node: Node) -> bool:
        """True if a node views groups as rows."""
        return _viewed(node) == (self, False)

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Rows viewed as groups; None if their extent is another one."""
        if not t.dim():
            return t
        extent = t.shape[-1]
        if not same(extent, 1) and not same(extent, self.count * self.columns):
            return None
        with torch.no_grad():
            return t.unsqueeze(-1) if same(extent, 1) else t.unflatten(-1, (self.count, self.columns))

    def unflattened(self, t: object) -> object:
        """Tensor with the dimensions of rows and one of their parts; the tensor itself if it has no flat parts."""
        if not self.is_flat or not isinstance(t, torch.Tensor) or not t.dim():
            return t
        if not same(t.shape[0], math.prod((*self.rows, self.count))):
            return t
        with torch.no_grad():
            return t.view(*self.rows, self.count, *t.shape[1:])

    def nodes_inside(self, graph: Graph) -> set[Node]:
        """Nodes that have groups as a dimension: from the view of rows as groups to the view back."""
        found = set[Node]()
        for node in graph.nodes:
            is_of_groups = inductor.is_fused(node) and not found.isdisjoint(node.all_input_nodes)
            if self.is_split(node) or is_of_groups and not self.is_joined(node):
                found.add(node)
        return found


def depends_on_whole_rows(graph: Graph, inside: Container[Node]) -> set[Node]:
    """Nodes that reduce whole rows, or depend on such a reduction. They cannot be computed as groups."""
    found = set[Node]()
    for node in graph.nodes:
        is_behind = inductor.is_reduction(node) or not found.isdisjoint(node.all_input_nodes)
        if inductor.is_fused(node) and is_behind and node not in inside:
            found.add(node)
    return found


def groups(graph: Graph, nodes: Container[Node]) -> list[Groups]:
    """Groups of rows, if something is computed before rows are viewed as groups, or after the view back."""
    found = dict[Groups, None]()
    for node in graph.nodes:
        viewed = _viewed(node) if node in nodes else None
        # Pairs of columns that are rotated, or were stacked, are no groups.
        if viewed is not None and source_of_turn_around(node) is None and len(stacked_tensors(node.args[0])) != 2:
            beside = (node.args[0],) if viewed[1] else node.users
            if any(other in nodes and not inductor.is_free(other) for other in beside):
                found[viewed[0]] = None
    return [*found]


def _viewed(node: Node) -> tuple[Groups, bool] | None:
    """Groups that a node views rows as, and True; or that it views as rows, and False. None for any other node."""
    meant = is_op(node, "view")
    one, other = value(meant.args[0]) if meant else None, value(node)
    if one is None or other is None or one.dtype is not other.dtype:
        return None
    for whole, parts in ((one, other), (other, one)):
        if (found := _flat(whole, parts)) is not None:
            return found, parts is other
    if abs(one.dim() - other.dim()) != 1:
        return None
    is_split = one.dim() < other.dim()
    whole, parts = (one, other) if is_split else (other, one)
    count, columns = parts.shape[-2:] if whole.dim() else (1, 1)
    if not isinstance(count, int) or not isinstance(columns, int) or columns == 1:
        return None
    if count == 1 and called_name(node) not in _OF_EXTENTS:  # the view only adds a dimension
        return None
    if not same(whole.shape[-1], count * columns) or not all(map(same, whole.shape[:-1], parts.shape[:-2])):
        return None
    return Groups(count, columns), is_split


def _flat(whole: torch.Tensor, parts: torch.Tensor) -> Groups | None:
    """Groups of rows along one dimension; None if there are none."""
    if whole.dim() < 2 or parts.dim() != 2:
        return None
    (*rows, extent), (_, columns) = whole.shape, parts.shape
    if not isinstance(extent, int) or not isinstance(columns, int) or not 1 < columns < extent or extent % columns:
        return None
    count = extent // columns
    return Groups(count, columns, True, (*rows,)) if same(parts.shape[0], math.prod((*rows, count))) else None
