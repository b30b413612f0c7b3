"""How a program sees a tensor: rows as groups of columns, and dimensions in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, Node

from graphfuse.torch.fusion.meaning import same, told
from graphfuse.torch.fusion.new_nodes import permuted, put


@dataclass(frozen=True)
class Arrangement:
    """Layout that a program sees a tensor in. groups: number and columns of the parts that a row is viewed as; empty
    where rows are whole. order: of the dimensions then."""

    groups: tuple[int, ...]
    order: tuple[int, ...]

    @staticmethod
    def seen(node: Node, tensor: torch.Tensor, order: Sequence[int]) -> Arrangement:
        """Arrangement of a node, which a region has as this tensor, its dimensions in this order."""
        return Arrangement(tuple(tensor.shape[-2:]) if tensor.dim() != told(node).dim() else (), tuple(order))

    @property
    def is_plain(self) -> bool:
        """True if the tensor is seen as it is."""
        return not self.groups and [*self.order] == sorted(self.order)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        return (t.unflatten(-1, self.groups) if self.groups else t).permute(self.order)

    def undone(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor of a view."""
        t = t.permute(self._back)
        return t.flatten(-2) if self.groups else t

    def is_unknown(self, t: torch.Tensor) -> bool:
        """True if a graph cannot have the view: it has one extent at most that is not known."""
        return bool(self.groups) and _known(t.shape[:-1]).count(-1) > 1

    def put(self, graph: Graph, node: Node) -> Node:
        """A node with the view of another."""
        if self.groups:
            node = put(graph, torch.ops.aten.view.default, node, [*_known(told(node).shape[:-1]), *self.groups])
        return permuted(graph, node, self.order)

    def put_back(self, graph: Graph, node: Node, like: torch.Tensor) -> Node:
        """A node with the tensor of a view, which has the shape of another."""
        if [*self.order] != sorted(self.order) and same(told(node).shape[-1], 1):
            # So that the dimension of extent 1 gets the stride that torch gives it.
            without = put(graph, torch.ops.aten.squeeze.dim, node, -1)
            node = put(graph, torch.ops.aten.unsqueeze.default, without, self.order[-1])
        else:
            node = permuted(graph, node, self._back)
        return put(graph, torch.ops.aten.view.default, node, _known(like.shape)) if self.groups else node

    @cached_property
    def _back(self) -> tuple[int, ...]:
        return tuple(map(self.order.index, range(len(self.order))))


def _known(shape: Sequence[object]) -> list[int]:
    """Extents, -1 for those that vary."""
    return [n if isinstance(n, int) else -1 for n in shape]
