"""Roles: what a kind of node is to the rows of a match.

A role says which nodes may join a match, where the tensors lie that it reads and writes, and what it computes. There is
one object for each op (``roles``), and no other file asks for the name of an op.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphfuse.op_graph.ir import FrozenGraph, Node, TensorId
from graphfuse.ops import Expansion
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.places import Piece
from graphfuse.patterns.values import Values


class Role:
    """A kind of node. The defaults are those of a node that moves nothing, and whose outputs others may read."""

    starts: ClassVar[bool] = False  # whether a match may start from it
    alone: ClassVar[bool] = False  # whether that match has no reduction: one that has takes the node, too
    final: ClassVar[bool] = False  # whether nothing that works on the rows can read what it makes
    narrows: ClassVar[bool] = False  # whether what it makes may have fewer columns than rows, as cosines of pairs have
    expansion: ClassVar[Expansion | None] = None  # steps of an op that takes several, such as a norm

    def columns(self, graph: FrozenGraph, node: Node, dim: tuple[int, ...]) -> tuple[int, ...] | None:
        """The axes that rows run along where a match starts from the node; None if none can. dim: of its input."""
        return (len(dim) - 1,)

    def axes(self, graph: FrozenGraph, node: Node) -> Axes | None:
        """Rows and columns of a match that starts from the node; None if none can."""
        dim = graph.tensors[dict(node.inputs).get("input", node.inputs[0][1])].dim
        columns = self.columns(graph, node, dim)
        sums = any(port.over_rows for port in node.op.outputs)
        return None if columns is None else Axes(graph, dim, columns, sums)

    def why_not(self, matched: "Matched", node: Node) -> str | None:
        """Why a node may not join a match, of which it is "they" in words that follow its name; None if it may."""
        raise NotImplementedError

    def is_regular(self, axes: Axes, node: Node) -> bool:
        """True if what a node makes is of rows, so that any node can read it."""
        return True

    def accepts(self, node: Node, t: TensorId, move: "Role", regular: bool) -> bool:
        """True if a node may read the output of a move, which says where rows lie. regular: what ``is_regular`` says
        of that."""
        return False

    def reduces(self, axes: Axes, node: Node) -> bool:
        """True if a node makes one value of each row."""
        return False

    def ends(self, axes: Axes, node: Node, t: TensorId) -> bool:
        """True if an output is not known before all rows are done, or only in its quantized form."""
        return self.final or any(port.over_rows and node.output(port.name) == t for port in node.op.outputs)

    def read(self, matched: "Matched", node: Node) -> tuple[Piece, ...]:
        """The tensors in memory that readers of a node's output read."""
        raise NotImplementedError

    def written(self, matched: "Matched", node: Node, piece: Piece) -> Piece:
        """The written part of `piece`, the output of this node or of one behind it."""
        return piece

    def compute(self, values: Values, matched: "Matched", node: Node) -> None:
        """Adds the values and stores of a node."""


@dataclass(frozen=True)
class Matched:
    """The nodes of a match, or those taken so far, as roles look at them. roles: by op."""

    axes: Axes
    inside: frozenset[int]
    roles: Mapping[str, Role]

    @property
    def graph(self) -> FrozenGraph:
        return self.axes.graph

    def role(self, node: Node) -> Role:
        return self.roles[node.op_name]

    def why_not(self, index: int) -> str | None:
        """Why a node may not join; None if it may."""
        node = self.graph.nodes[index]
        return self.role(node).why_not(self, node) if node.op_name in self.roles else "is no operation on rows"

    def made_by(self, t: TensorId) -> Node | None:
        """The matched node that makes a tensor."""
        found = self.graph.producer.get(t)
        return self.graph.nodes[found] if found in self.inside else None

    def readers(self, t: TensorId) -> list[Node]:
        """The matched nodes that read a tensor."""
        return [self.graph.nodes[i] for i in self.graph.consumers.get(t, ()) if i in self.inside]

    def kept(self, t: TensorId) -> bool:
        """True if matched nodes alone read a tensor, so that it need not be written."""
        return self.graph.tensors[t].virtual and self.inside.issuperset(self.graph.consumers.get(t, ()))

    def ended(self, t: TensorId) -> bool:
        """True if a matched node makes a tensor that others cannot read."""
        node = self.made_by(t)
        return node is not None and self.role(node).ends(self.axes, node, t)

    def read(self, t: TensorId) -> tuple[Piece, ...]:
        """The tensors in memory that are read for a tensor, one where no matched node moves rows. They may have the
        axes of the graph's tensors still."""
        node = self.made_by(t)
        return (Piece(self.graph.tensors[t]),) if node is None else self.role(node).read(self, node)

    def written(self, t: TensorId, piece: Piece) -> Piece:
        """The written part of `piece`, a tensor in memory, where its value is that of `t`."""
        node = self.made_by(t)
        return piece if node is None else self.role(node).written(self, node, piece)
