"""Bytes that nodes move between memory and a kernel, computed from the graph alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, Subgraph, TensorId


@dataclass(frozen=True)
class Traffic:
    """Bytes that are read from memory and written to it."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written)


def nbytes(t: FrozenTensor) -> int:
    """Bytes of a tensor's elements. Elements that a stride of 0 repeats count once; scalars passed by value count 0."""
    if t.by_value or t.value is not None:
        return 0
    extents = (e if e == 0 or s else 1 for e, s in zip(t.dim, t.stride, strict=True))
    return t.dtype.nbytes(math.prod(extents))


def of_node(graph: FrozenGraph, node: Node) -> Traffic:
    """Traffic of a kernel that runs the node alone."""
    return _traffic(graph, (t for _, t in node.inputs), (t for _, t in node.outputs))


def fused(subgraph: Subgraph) -> Traffic:
    """Traffic of one kernel for all nodes, without the tensors that only these nodes use."""
    return _traffic(subgraph.graph, subgraph.inputs, subgraph.outputs)


def unfused(subgraph: Subgraph) -> Traffic:
    """Traffic of one kernel for each node."""
    return sum((of_node(subgraph.graph, node) for node in subgraph.nodes), Traffic(0, 0))


def _traffic(graph: FrozenGraph, reads: Iterable[TensorId], writes: Iterable[TensorId]) -> Traffic:
    """Traffic that counts each tensor once, even if several ports have it."""
    return Traffic(*(sum(nbytes(graph.tensors[t]) for t in dict.fromkeys(ids)) for ids in (reads, writes)))
