"""A rewrite of the frozen graph: a reduction along axes that lie apart in memory becomes two.

The first is along those axes that are one run of elements, which are rows of a kernel. The second is along the others,
of what the first made, which is little. What pointwise nodes make for the first and for others, too, is computed again
for it, as it is in another kernel.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from graphfuse.base.enums import reduction_mode
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, TensorId, packed_stride

_BESIDE = ("matmul", "conv", "sdpa")
"""Products, as their ops' names begin. Libraries compute them with the reduction behind."""
_AGAIN = {mode: mode for mode in reduction_mode if mode.name in ("ADD", "MIN", "MAX", "AMAX", "AVG")}
_AGAIN[reduction_mode.NORM1] = reduction_mode.ADD
"""By mode, that which makes its result of what it makes of parts."""


@dataclass(frozen=True)
class _Apart:
    """A reduction that becomes two.

    number: of the node. inner: the axes of the first. again: nodes that are computed again for it. own: those that are
    for it alone, itself among them.
    """

    number: int
    inner: tuple[int, ...]
    again: frozenset[int]
    own: frozenset[int]


def reduce_in_two(graph: FrozenGraph) -> FrozenGraph:
    """The graph with two reductions in the place of each that is along axes apart."""
    if any(node.op_name.startswith(_BESIDE) for node in graph.nodes):
        return graph
    apart = [*_apart(graph)]
    if not apart:
        return graph
    tensors, nodes, new = [*graph.tensors], list[Node](), dict[tuple[int, TensorId], TensorId]()
    uids = itertools.count(max(t.uid for t in tensors) + 1)

    def made(t: FrozenTensor, name: str, **fields: object) -> TensorId:
        tensors.append(replace(t, id=len(tensors), uid=next(uids), name=name, virtual=True, **fields))
        return tensors[-1].id

    for number, node in enumerate(graph.nodes):
        for one in apart:
            read = tuple((port, new.get((one.number, t), t)) for port, t in node.inputs)
            if number in one.again:
                ((port, t),) = node.outputs
                name = f"{node.name}::{graph.nodes[one.number].name}"
                new[one.number, t] = made(graph.tensors[t], f"{name}::{port}")
                nodes.append(replace(node, name=name, inputs=read, outputs=((port, new[one.number, t]),)))
            elif number in one.own:
                node = replace(node, inputs=read)
            if number == one.number:
                (port, t), name = node.inputs[0], f"{node.name}::parts"
                dim = tuple(1 if axis in one.inner else e for axis, e in enumerate(tensors[t].dim))
                parts = made(tensors[t], name, dtype=node.compute, dim=dim, stride=packed_stride(dim))
                outputs = ((node.outputs[0][0], parts),)
                axes = tuple(axis for axis, extent in enumerate(dim) if extent == 1)
                nodes.append(_with(replace(node, name=name, outputs=outputs), axes=axes))
                node = _with(replace(node, inputs=((port, parts),)), mode=_AGAIN[node.attribute("mode")])
        nodes.append(node)
    return FrozenGraph(graph.name, tuple(tensors), tuple(nodes))


def _with(node: Node, **attributes: object) -> Node:
    return replace(node, attributes=tuple((dict(node.attributes) | attributes).items()))


def _apart(graph: FrozenGraph) -> Iterator[_Apart]:
    for number, node in enumerate(graph.nodes):
        if node.op_name == "reduction" and node.attribute("mode") in _AGAIN:
            inner = _innermost(graph.tensors[node.inputs[0][1]], node.attribute("axes"))
            if inner:
                made_of = _pointwise_before(graph, number)
                own = {number}
                for one in sorted(made_of, reverse=True):
                    ((_, t),) = graph.nodes[one].outputs
                    if own.issuperset(graph.consumers[t]):
                        own.add(one)
                yield _Apart(number, inner, frozenset(made_of - own), frozenset(own))


def _innermost(t: FrozenTensor, axes: Collection[int]) -> tuple[int, ...]:
    """Axes, of some, that one stride joins, from that of elements next to each other on; none if these are all."""
    inside = sorted((axis for axis in axes if t.dim[axis] != 1), key=lambda axis: t.stride[axis])
    if not t.elements or not inside or t.stride[inside[0]] != 1:
        return ()
    joined = 1
    while joined < len(inside) and t.stride[inside[joined]] == t.stride[inside[joined - 1]] * t.dim[inside[joined - 1]]:
        joined += 1
    return tuple(inside[:joined]) if joined < len(inside) else ()


def _pointwise_before(graph: FrozenGraph, number: int) -> set[int]:
    """Pointwise nodes that make what a node reads, and is not in memory."""
    found, waiting = set[int](), [number]
    while waiting:
        for _, t in graph.nodes[waiting.pop()].inputs:
            before = graph.producer.get(t) if graph.tensors[t].virtual else None
            if before is not None and before not in found and graph.nodes[before].op.pointwise:
                found.add(before)
                waiting.append(before)
    return found
