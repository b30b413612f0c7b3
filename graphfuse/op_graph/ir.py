"""The frozen graph that matching and planning work on: tensors, nodes, subgraphs.

``freeze`` makes it from the user's graph, with every shape, stride and data type. It never changes afterwards.
``verify.check_ir`` checks its invariants.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

from graphfuse.base import ragged, reordering
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.ops import OPS, Op
from graphfuse.ops.layouts import packed_stride as packed_stride

TensorId = int


@dataclass(frozen=True)
class FrozenTensor:
    """A tensor of the graph. dim and stride are in elements.

    virtual: exists only between nodes.
    by_value: a host scalar, given at execute or, if set, `value`.
    alignment: of its address, in bytes.
    workspace: a fixed byte offset in the workspace, for results that callers read there.
    reordering: the order of elements in memory; unless it is NONE, the stride has no meaning.
    blocks: the axis of blocks of a reordered tensor.
    ragged: the tensor of offsets at which batches begin, in units of `multiplier` elements. The stride of the batch
        axis has no meaning then.
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
    reordering: tensor_reordering = tensor_reordering.NONE
    blocks: int = -1
    ragged: TensorId | None = None
    multiplier: int = 1

    @property
    def elements(self) -> int:
        return math.prod(self.dim)

    @property
    def span(self) -> int:
        """Elements from the first to one past the last (0 for an empty tensor), with padding if reordered."""
        if self.reordering is tensor_reordering.F8_128x4:
            return reordering.padded(self.dim, self.blocks)
        if 0 in self.dim:
            return 0
        if self.ragged is not None:
            return ragged.span(self.dim, self.stride)
        return 1 + sum((e - 1) * s for e, s in zip(self.dim, self.stride, strict=True))

    @property
    def packed_axis(self) -> int | None:
        """The axis of stride 1, along which types below a byte are packed; None if there is none."""
        touching = (axis for axis, (e, s) in enumerate(zip(self.dim, self.stride, strict=True)) if e > 1 and s == 1)
        return next(touching, None)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.dtype.nbytes(self.span)

    def __str__(self) -> str:
        plain = self.reordering is tensor_reordering.NONE
        layout = f"stride {list(self.stride)}" if plain else self.reordering.name
        layout += "" if self.ragged is None else ", ragged"
        return f"tensor {self.name!r} ({self.dtype.name} {list(self.dim)}, {layout})"


@dataclass(frozen=True)
class Node:
    """One operation. inputs, outputs: (port name, tensor id) of each port that is present."""

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

    @property
    def scales(self) -> dict[TensorId, object]:
        """Tensor of scales -> axis of its blocks."""
        axes = {port.name: port.scales for port in (*self.op.inputs, *self.op.outputs) if port.scales}
        return {t: self.attribute(axes[port]) for port, t in (*self.inputs, *self.outputs) if port in axes}

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op_name})"


@dataclass(frozen=True)
class FrozenGraph:
    """A graph with its tensors by id, and its nodes in topological order."""

    name: str
    tensors: tuple[FrozenTensor, ...]
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
    def ancestors(self) -> tuple[int, ...]:
        """Nodes that each node depends on, including itself, as bits: bit i stands for node i."""
        found: list[int] = []
        for i, node in enumerate(self.nodes):
            before = (found[self.producer[t]] for _, t in node.inputs if t in self.producer)
            found.append(reduce(or_, before, 1 << i))
        return tuple(found)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Nodes that depend on each node, including itself, as bits: bit i stands for node i."""
        found = [1 << i for i in range(len(self.nodes))]
        for i in reversed(range(len(self.nodes))):
            for _, t in self.nodes[i].inputs:
                if t in self.producer:
                    found[self.producer[t]] |= found[i]
        return tuple(found)

    def needs(self, tensors: Iterable[TensorId], nodes: Collection[int]) -> bool:
        """True if one of `tensors` depends on one of `nodes`."""
        return not self.above(tensors).isdisjoint(nodes)

    def above(self, tensors: Iterable[TensorId]) -> set[int]:
        """The nodes that `tensors` depend on."""
        return _numbers(reduce(or_, (self.ancestors[self.producer[t]] for t in tensors if t in self.producer), 0))

    def below(self, tensors: Iterable[TensorId]) -> set[int]:
        """The nodes that depend on one of `tensors`."""
        readers = (i for t in tensors for i in self.consumers.get(t, ()))
        return _numbers(reduce(or_, (self.descendants[i] for i in readers), 0))

    @cached_property
    def bound(self) -> tuple[FrozenTensor, ...]:
        """The tensors that execute needs a value for, in id order."""
        used = {t for node in self.nodes for _, t in node.inputs + node.outputs}
        return tuple(
            t for t in self.tensors if t.id in used and not t.virtual and t.value is None and t.workspace is None
        )

    @cached_property
    def outputs(self) -> tuple[FrozenTensor, ...]:
        """Tensors that the graph writes for its caller, in id order."""
        return tuple(t for t in self.tensors if t.id in self.producer and not t.virtual)

    def key(self) -> str:
        """A digest of the computation. It is independent of node order and names, and of nothing else."""
        return _key(self)


@dataclass(frozen=True)
class Subgraph:
    """Some nodes of a graph, in order, with their external inputs and outputs.

    It is compared and hashed by its nodes alone: planning does both often, and always within one graph.
    """

    graph: FrozenGraph = field(repr=False, compare=False)
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
        """Tensors written by its nodes that are not virtual, or that other nodes read."""
        inside = set(self.node_ids)
        return _unique(
            t
            for node in self.nodes
            for _, t in node.outputs
            if not self.graph.tensors[t].virtual or not inside.issuperset(self.graph.consumers.get(t, ()))
        )


def _unique(ids: Iterable[TensorId]) -> tuple[TensorId, ...]:
    return tuple(dict.fromkeys(ids))


def _numbers(bits: int) -> set[int]:
    return {i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"}


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _key(graph: FrozenGraph) -> str:
    colors = _colors(graph)
    lines: list[object] = []
    numbers: dict[TensorId, int] = {}
    # A walk from the ends, in an order independent of names and positions, numbers and writes down the whole graph:
    # equal texts are equal computations.
    ends = [t.id for t in graph.tensors if t.id in graph.producer and t.id not in graph.consumers]
    waiting = sorted(ends + [t.id for t in graph.outputs], key=lambda t: (colors[t], t), reverse=True)
    while waiting:
        t = waiting[-1]
        made_by = graph.producer.get(t)
        if t in numbers:
            waiting.pop()
            continue
        if made_by is None:
            waiting.pop()
            numbers[t] = len(numbers)
            lines.append(_own(graph.tensors[t]))
            continue
        node = graph.nodes[made_by]
        if missing := [i for _, i in sorted(node.inputs) if i not in numbers]:
            waiting += reversed(missing)
            continue
        waiting.pop()
        outs = sorted(node.outputs)
        numbers.update({o: len(numbers) + k for k, (_, o) in enumerate(outs)})
        ins = [(port, numbers[i]) for port, i in sorted(node.inputs)]
        lines.append((_described(node), ins, [(port, _own(graph.tensors[o])) for port, o in outs]))
    return _digest(*lines)


def _colors(graph: FrozenGraph) -> dict[TensorId, str]:
    """A digest per tensor of its surroundings, refined until no more tensors are distinguished."""
    colors = {t.id: _digest(_own(t)) for t in graph.tensors}
    distinct = 0
    while distinct < len(set(colors.values())):
        distinct = len(set(colors.values()))
        # A pass down and a pass up the nodes, so that one round includes all that a tensor depends on and all that
        # depends on it: a chain takes a few rounds, whatever its length.
        for node in graph.nodes:
            around = _around(node, colors)
            colors |= {t: _digest(colors[t], port, around) for port, t in node.outputs}
        read: dict[TensorId, list[object]] = {t.id: [] for t in graph.tensors}
        for node in reversed(graph.nodes):
            colors |= {t: _digest(colors[t], sorted(read[t])) for _, t in node.outputs}
            around = _around(node, colors)
            for port, t in node.inputs:
                read[t].append((port, around))
        colors |= {t: _digest(colors[t], sorted(found)) for t, found in read.items() if t not in graph.producer}
    return colors


def _around(node: Node, colors: Mapping[TensorId, str]) -> str:
    return _digest(_described(node), [(port, colors[t]) for port, t in sorted(node.inputs) + sorted(node.outputs)])


def _own(t: FrozenTensor) -> tuple:
    # Without number, uid and name, which identify the tensor and do not change the computation.
    return (
        t.dtype.name,
        t.dim,
        t.stride,
        t.virtual,
        t.by_value,
        t.value,
        t.alignment,
        t.workspace,
        t.reordering.name if t.blocks == -1 else f"{t.reordering.name} along {t.blocks}",
        *(() if t.ragged is None else (t.multiplier,)),  # the offsets are an input of the node
    )


def _described(node: Node) -> tuple:
    return (node.op_name, node.compute.name, tuple((k, repr(v)) for k, v in sorted(node.attributes)))
