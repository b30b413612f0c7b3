"""Roles: how nodes of an op take part in a match of rows.

A role decides whether a node may join a match, where the tensors lie that it reads and writes, and what it computes.
There is one object for each op (``roles``); no other file depends on names of ops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphfuse.op_graph.ir import FrozenGraph, Node, TensorId
from graphfuse.ops import Expansion
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.sections import Section
from graphfuse.patterns.values import Values


class Role:
    """Role of an op. The defaults are for a node that moves nothing, and whose outputs matched nodes may read."""

    starts: ClassVar[bool] = False  # whether a match may start from it
    alone: ClassVar[bool] = False  # whether that match excludes reductions, whose own matches include the node
    final: ClassVar[bool] = False  # whether no matched node can read its output
    narrows: ClassVar[bool] = False  # whether its output may have fewer columns than rows, such as cosines
    expansion: ClassVar[Expansion | None] = None  # of an op that has one, such as a norm

    def columns(self, graph: FrozenGraph, node: Node, dim: tuple[int, ...]) -> tuple[int, ...] | None:
        """The axes of columns of a match that starts from the node; None if none can. dim: of its input."""
        return (len(dim) - 1,)

    def axes(self, graph: FrozenGraph, node: Node) -> Axes | None:
        """Rows and columns of a match that starts from the node; None if none can."""
        dim = graph.tensors[dict(node.inputs).get("input", node.inputs[0][1])].dim
        columns = self.columns(graph, node, dim)
        sums = any(port.over_rows for port in node.op.outputs)
        return None if columns is None else Axes(graph, dim, columns, sums)

    def why_not(self, matched: "PartialMatch", node: Node) -> str | None:
        """Reason why a node may not join a match; None if it may. "They" in its text are the matched nodes."""
        raise NotImplementedError

    def is_regular(self, axes: Axes, node: Node) -> bool:
        """True if the output of a move has the form of rows, so that any node can read it."""
        return True

    def accepts(self, node: Node, t: TensorId, move: "Role", regular: bool) -> bool:
        """True if a node may read the output `t` of a move. regular: result of ``is_regular`` for the move."""
        return False

    def reduces(self, axes: Axes, node: Node) -> bool:
        """True if a node reduces each row to one value."""
        return False

    def ends(self, axes: Axes, node: Node, t: TensorId) -> bool:
        """True if matched nodes cannot read an output: it needs all rows, or exists only in its final form."""
        return self.final or any(port.over_rows and node.output(port.name) == t for port in node.op.outputs)

    def read(self, matched: "PartialMatch", node: Node) -> tuple[Section, ...]:
        """The sections in memory that are read for a node's output."""
        raise NotImplementedError

    def written(self, matched: "PartialMatch", node: Node, section: Section) -> Section:
        """The written part of `section`, the output of this node or of a move after it."""
        return section

    def compute(self, values: Values, matched: "PartialMatch", node: Node) -> None:
        """Adds the values and stores of a node."""


@dataclass(frozen=True)
class PartialMatch:
    """The nodes that have joined a match so far, for roles. inside: their indices. roles: by op."""

    axes: Axes
    inside: frozenset[int]
    roles: Mapping[str, Role]

    @property
    def graph(self) -> FrozenGraph:
        return self.axes.graph

    def role(self, node: Node) -> Role:
        return self.roles[node.op_name]

    def why_not(self, index: int) -> str | None:
        """Reason why a node may not join; None if it may."""
        node = self.graph.nodes[index]
        return self.role(node).why_not(self, node) if node.op_name in self.roles else "is no operation on rows"

    def made_by(self, t: TensorId) -> Node | None:
        """The matched node that makes a tensor; None if there is none."""
        found = self.graph.producer.get(t)
        return self.graph.nodes[found] if found in self.inside else None

    def readers(self, t: TensorId) -> list[Node]:
        """The matched nodes that read a tensor."""
        return [self.graph.nodes[i] for i in self.graph.consumers.get(t, ()) if i in self.inside]

    def kept(self, t: TensorId) -> bool:
        """True if only matched nodes read a tensor, so that it need not be written."""
        return self.graph.tensors[t].virtual and self.inside.issuperset(self.graph.consumers.get(t, ()))

    def ended(self, t: TensorId) -> bool:
        """True if a matched node makes a tensor that no matched node can read."""
        node = self.made_by(t)
        return node is not None and self.role(node).ends(self.axes, node, t)

    def read(self, t: TensorId) -> tuple[Section, ...]:
        """The sections in memory that are read for a tensor: one, unless a matched node moves its rows. Their tensors
        may still have the axes of the graph."""
        node = self.made_by(t)
        return (Section(self.graph.tensors[t]),) if node is None else self.role(node).read(self, node)

    def written(self, t: TensorId, section: Section) -> Section:
        """The written part of `section`, whose value is that of `t`."""
        node = self.made_by(t)
        return section if node is None else self.role(node).written(self, node, section)
