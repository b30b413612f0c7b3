"""Records of a user's graph before anything is inferred. ``freeze`` and ``printing`` read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import Op


@dataclass(frozen=True)
class NodeRecord:
    """A node as the user made it.

    only_if_read: whether the node is omitted if nothing reads its results; for other nodes that is an error.
    """

    name: str
    op: Op
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    attributes: Mapping[str, object]
    compute: data_type
    only_if_read: bool = False

    @property
    def absent(self) -> frozenset[str]:
        """Output ports that the node does not write."""
        return self.op.absent(self.attributes, frozenset(self.inputs))


@dataclass(eq=False, repr=False)
class GraphRecord:
    """A graph as recorded.

    io_data_type, intermediate_data_type, compute_data_type: defaults for tensors and nodes without a type.
    intermediate_rounding: "float32", or "declared" if all virtual tensors are rounded to the type they declare.
    nodes: in topological order.
    takes_overrides: whether calls may give other leading extents.
    """

    name: str
    io_data_type: data_type
    intermediate_data_type: data_type
    compute_data_type: data_type
    intermediate_rounding: str
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[NodeRecord] = field(default_factory=list)
    takes_overrides: bool = False

    @property
    def needed(self) -> list[NodeRecord]:
        """The nodes without those that are `only_if_read` and that nothing reads."""
        found: list[NodeRecord] = []
        read: set[int] = set()
        for node in reversed(self.nodes):
            if not node.only_if_read or any(not t.get_is_virtual() or id(t) in read for t in node.outputs.values()):
                found.append(node)
                read |= {id(t) for t in node.inputs.values()}
        return found[::-1]

    @property
    def kept(self) -> list[Tensor]:
        """The tensors without outputs that no node of `needed` writes."""
        made = {id(t) for node in self.nodes for t in node.outputs.values()}
        written = {id(t) for node in self.needed for port, t in node.outputs.items() if port not in node.absent}
        return [t for t in self.tensors if id(t) not in made - written]
