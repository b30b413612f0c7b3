"""Tensors that an operator moves and inductor would not: inductor computes a norm's neighbours in one kernel with the
norm.

Inductor writes a norm, the operations before it and the operations on its result as one loop over rows, and moves only
what enters or leaves the loop. An operator reads and writes its own tensors, and inductor's kernels next to it read or
write them again. An operation that also needs a library's result that depends on the norm, such as a residual sum after
a layer, is never in the norm's kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import hint, is_op, same, value
from graphfuse.torch.analysis.traversal import reachable

_NAMED = 4
"""Number of operations that a report names for one crossing."""
_BEFORE = "before it"
_FUSED, _AFTER_LIBRARY = 1, 2
"""How a node depends on a norm: through inductor's kernels alone, or through a library call, which ends the kernel."""
_SMALL = 1 / 8
"""Share of the elements of the largest tensor up to which a tensor is not counted, such as vectors and values of
rows."""


@dataclass(frozen=True)
class Crossing:
    """A tensor between an operator and operations that inductor would compute in one kernel with it.

    tensor: the node of the tensor. others: nodes there that read or make it. where: in words. moved, moved_backward:
    bytes of an element of the largest tensor that are moved because of it, in forward and in backward.
    """

    tensor: Node
    others: tuple[Node, ...]
    where: str
    moved: float
    moved_backward: float

    def __str__(self) -> str:
        titles = [*dict.fromkeys(map(_title, self._with_what_follows()))]
        return f"{', '.join(titles[:_NAMED])}{', ...' * (len(titles) > _NAMED)} {self.where}"

    def _with_what_follows(self) -> Iterator[Node]:
        """The others, and the operations after them that inductor computes with them."""

        def behind(node: Node) -> Iterable[Node]:
            return filter(inductor.is_fused, node.users) if self.where != _BEFORE else ()

        return (node for node in reachable(self.others, behind) if not inductor.is_free(node))


@dataclass(frozen=True, eq=False)
class ReplacedNodes:
    """The part of a graph that an operator replaces.

    made: nodes of its results, the largest first.
    needed: nodes of its arguments.
    read: arguments that are not small compared with the largest.
    own: nodes that it replaces.
    is_training: whether its results have gradients.
    columns: number of dimensions that rows lie along.
    """

    made: tuple[Node, ...]
    needed: tuple[Node, ...]
    read: tuple[Node, ...]
    own: frozenset[Node]
    is_training: bool
    columns: int = 1

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Tensors that are moved once more than by inductor alone."""
        return tuple(self._crossings())

    def _crossings(self) -> Iterator[Crossing]:
        for tensor in self.made:
            if not is_as_large(tensor, self._largest):
                continue  # one value per row, such as a loss, is negligible
            fused, recomputed, kept = self._readers_by_kind(tensor)
            moves = bool(fused) + (not kept and bool(fused or recomputed))
            if moves:
                yield self._crossing(tensor, (*fused, *recomputed), "behind it", moves)
        for tensor in self.read:
            maker = self._maker(tensor)
            fused, recomputed, kept = self._readers_by_kind(tensor)
            if maker is not None:
                yield self._crossing(tensor, (maker,), _BEFORE, 1 + (not kept))
            elif fused:
                yield self._crossing(tensor, fused, "beside it", 1)

    @cached_property
    def _largest(self) -> Node:
        """Node with a value for each element of the rows."""
        return largest((*self.read, *self.made))

    def _crossing(self, tensor: Node, others: tuple[Node, ...], where: str, moves: int) -> Crossing:
        width = value(tensor).dtype.itemsize * share(tensor, self._largest)
        has_backward = self.is_training and value(tensor).requires_grad
        back = 0 if not has_backward or all(map(inductor.passes_gradients, others)) else moves
        return Crossing(tensor, others, where, moves * width, back * width)

    def _readers(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Nodes outside the operator that read a tensor, also through views, and the node that each of them reads."""
        for user in node.users:
            if not inductor.reads(user):
                continue
            is_own = user in self.own
            if is_op(user, "cast", "same", "view") if is_own else inductor.is_free(user):
                yield from self._readers(user)
            elif not is_own:
                yield user, node

    def _readers_by_kind(self, tensor: Node) -> tuple[tuple[Node, ...], ...]:
        """Readers of a tensor: those in one kernel with the norm, those that would compute it again from what the norm
        reads, and those that read it from memory."""
        fused, recomputed, kept = [], [], []
        for user, given in self._readers(tensor):
            if inductor.is_cast_by_autocast(user, given):
                fused.append(user)
            elif (
                user in self._upstream
                or self._dependence.get(user) == _AFTER_LIBRARY
                or not inductor.is_generated(user)
            ):
                kept.append(user)
            elif is_as_large(given, self._largest) and inductor.is_of_rows(user, given, self.columns):
                fused.append(user)
            else:
                recomputed.append(user)
        return tuple(fused), tuple(recomputed), tuple(kept)

    def _maker(self, tensor: Node) -> Node | None:
        """Node that makes a tensor in one kernel with the norm; None if there is none."""
        node = tensor
        while inductor.is_free(node) and isinstance(node.args[0], Node):
            node = node.args[0]
        if not inductor.is_generated(node) or any(user in self._upstream for user, _ in self._readers(tensor)):
            return None
        return node

    @cached_property
    def _dependence(self) -> dict[Node, int]:
        """Dependence of nodes on the results of the operator, up to its last reader."""
        readers = [user for t in (*self.made, *self.read) for user, _ in self._readers(t)]
        found, first, last = dict.fromkeys(self.made, _FUSED), min(self.made), max((*readers, *self.made))
        for node in (node for node in first.graph.nodes if first <= node <= last):
            how = max((found.get(t, 0) for t in node.all_input_nodes), default=0)
            if node not in found and how:
                is_through = node in self.own or inductor.is_fused(node)
                found[node] = how if is_through else _AFTER_LIBRARY
        return found

    @cached_property
    def _upstream(self) -> set[Node]:
        """Nodes after the first tensor that the operator reads, from which its arguments are computed."""
        first = min(self.read)
        found = reachable(self.needed, lambda node: node.all_input_nodes if node > first else ())
        return {node for node in found if node > first}


def _title(node: Node) -> str:
    name = inductor.title(node)
    return name if inductor.is_generated(node) else f"autocast's cast for {name}"


def elements(node: Node) -> int:
    return hint(value(node).numel())


def largest(nodes: Iterable[Node]) -> Node:
    return max(nodes, key=elements)


def share(node: Node, of: Node) -> float:
    """Number of elements of a tensor over that of another; 1 if they are equal, even if extents vary."""
    return 1.0 if is_as_large(node, of) else elements(node) / max(1, elements(of))


def is_small(node: Node, beside: Node) -> bool:
    return share(node, beside) <= _SMALL


def is_as_large(a: Node, b: Node) -> bool:
    return same(value(a).numel(), value(b).numel())
