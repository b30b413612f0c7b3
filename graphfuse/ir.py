"""The frozen graph that matching and planning work on: tensors, nodes, subgraphs.

Made from the user's graph by ``graphfuse.graph`` with every shape, stride and data
type filled in; never changed afterwards. ``verify.check_ir`` states its invariants.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from graphfuse.dtypes import data_type
from graphfuse.ops import OPS, Op

TensorId = int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph. dim and stride are in elements.

    virtual: lives only between nodes. by_value: a host scalar given at execute, or
    `value` if that is set. alignment: bytes that its address is a multiple of.
    workspace: fixed byte offset in the workspace, for results that callers read there.
    """

    id: TensorId
    uid: int
    name: str
    dtype: data_type
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    virtual: bool = False
    by_value: bool = False
    value: float | None = None
    alignment: int = 16
    workspace: int | None = None

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.dim:
            count *= extent
        return count

    @property
    def span(self) -> int:
        """Elements from the first to one past the last (0 for an empty tensor)."""
        if 0 in self.dim:
            return 0
        return 1 + sum((e - 1) * s for e, s in zip(self.dim, self.stride, strict=True))

    @property
    def packed_axis(self) -> int | None:
        """The axis along which neighbours touch: the one that types below a byte are packed along."""
        touching = (axis for axis, (e, s) in enumerate(zip(self.dim, self.stride, strict=True)) if e > 1 and s == 1)
        return next(touching, None)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.dtype.nbytes(self.span)

    def __str__(self) -> str:
        return f"tensor {self.name!r} ({self.dtype.name} {list(self.dim)}, stride {list(self.stride)})"


@dataclass(frozen=True)
class Node:
    """One operation. inputs and outputs map port names to tensor ids, absent ports left out."""

    name: str
    op_name: str
    inputs: tuple[tuple[str, TensorId], ...]
    outputs: tuple[tuple[str, TensorId], ...]
    attributes: tuple[tuple[str, object], ...] = ()
    compute: data_type = data_type.FLOAT

    @property
    def op(self) -> Op:
        return OPS[self.op_name]

    def input(self, port: str) -> TensorId | None:
        return dict(self.inputs).get(port)

    def output(self, port: str) -> TensorId | None:
        return dict(self.outputs).get(port)

    def attribute(self, name: str) -> object:
        return dict(self.attributes)[name]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op_name})"


@dataclass(frozen=True)
class Graph:
    """Tensors by id and nodes in an order in which each comes after its producers."""

    name: str
    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def producer(self) -> Mapping[TensorId, int]:
        """Tensor id -> index of the node that writes it."""
        return {t: i for i, node in enumerate(self.nodes) for _, t in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[TensorId, tuple[int, ...]]:
        """Tensor id -> indices of the nodes that read it, once per port."""
        found: dict[TensorId, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for _, t in node.inputs:
                found.setdefault(t, []).append(i)
        return {t: tuple(nodes) for t, nodes in found.items()}

    @cached_property
    def bound(self) -> tuple[Tensor, ...]:
        """The tensors that execute needs a value for, in id order."""
        used = {t for node in self.nodes for _, t in node.inputs + node.outputs}
        return tuple(
            t for t in self.tensors if t.id in used and not t.virtual and t.value is None and t.workspace is None
        )

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the graph writes for its caller, in id order."""
        return tuple(t for t in self.tensors if t.id in self.producer and not t.virtual)

    def key(self) -> str:
        """A digest of the computation: node order and names do not matter, all else does."""
        return _key(self)


@dataclass(frozen=True)
class Subgraph:
    """Some nodes of a graph, in order, with what they read from and write to outside."""

    graph: Graph = field(repr=False)
    node_ids: tuple[int, ...]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.graph.nodes[i] for i in self.node_ids)

    @cached_property
    def inputs(self) -> tuple[TensorId, ...]:
        made = {t for node in self.nodes for _, t in node.outputs}
        return _unique(t for node in self.nodes for _, t in node.inputs if t not in made)

    @cached_property
    def outputs(self) -> tuple[TensorId, ...]:
        """Written tensors that are not virtual or that a node outside reads."""
        inside = set(self.node_ids)
        return _unique(
            t
            for node in self.nodes
            for _, t in node.outputs
            if not self.graph.tensors[t].virtual or not inside.issuperset(self.graph.consumers.get(t, ()))
        )


def _unique(ids: Iterable[TensorId]) -> tuple[TensorId, ...]:
    return tuple(dict.fromkeys(ids))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _key(graph: Graph) -> str:
    # A first hash per tensor orders the outputs without looking at names or node order;
    # numbering leaves and nodes in a walk from there then tells add(a, b) from add(a, a).
    hashes: dict[TensorId, str] = {}

    def own(t: Tensor) -> tuple:
        # TensorId, uid and name are left out: they say which tensor, not what is computed.
        return (t.dtype.name, t.dim, t.stride, t.virtual, t.by_value, t.value, t.alignment, t.workspace)

    def describe(node: Node) -> tuple:
        return (node.op_name, node.compute.name, tuple((k, repr(v)) for k, v in sorted(node.attributes)))

    for t in graph.tensors:
        if t.id not in graph.producer:
            hashes[t.id] = _digest(own(t))
    for node in graph.nodes:
        ins = sorted((port, hashes[t]) for port, t in node.inputs)
        for port, t in node.outputs:
            hashes[t] = _digest(own(graph.tensors[t]), port, describe(node), ins)

    lines: list[object] = []
    numbers: dict[TensorId, int] = {}

    def visit(t: TensorId) -> int:
        if t not in numbers:
            made_by = graph.producer.get(t)
            if made_by is None:
                numbers[t] = len(numbers)
                lines.append(own(graph.tensors[t]))
            else:
                node = graph.nodes[made_by]
                ins = [(port, visit(i)) for port, i in sorted(node.inputs)]
                outs = []
                for port, o in sorted(node.outputs):
                    numbers[o] = len(numbers)
                    outs.append((port, numbers[o], own(graph.tensors[o])))
                lines.append((describe(node), ins, outs))
        return numbers[t]

    ends = [t.id for t in graph.tensors if t.id in graph.producer and t.id not in graph.consumers]
    for t in sorted(ends + [t.id for t in graph.outputs], key=lambda i: (hashes[i], i)):
        visit(t)
    return _digest(*lines)
