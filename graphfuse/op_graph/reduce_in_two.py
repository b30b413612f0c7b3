"""A rewrite of the frozen graph: a reduction along axes that lie apart in memory becomes two.

The first is along those axes that are one run of elements, which are rows of a kernel. The second is along the others,
of what the first made, which is little. Pointwise nodes that other nodes read, too, are computed again in the kernel of
the first.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, TensorId, packed_stride

_BESIDE = ("matmul", "conv", "sdpa")
"""Products, as their ops' names begin. Libraries compute them with the reduction behind."""
_AGAIN = {mode: mode for mode in reduction_mode if mode.name in ("ADD", "MIN", "MAX", "AMAX", "AVG")}
_AGAIN[reduction_mode.NORM1] = reduction_mode.ADD
"""By mode, that which makes its result of what it makes of parts. NORM2 would have a root between."""


@dataclass(frozen=True)
class _Apart:
    """Reductions that become two each, of which one kernel may make the first.

    numbers: of the nodes.
    inner: the axes of the first.
    again: nodes that are computed again for them.
    own: those that are for them alone, themselves among these.
    """

    numbers: frozenset[int]
    inner: tuple[int, ...]
    again: frozenset[int]
    own: frozenset[int]


def reduce_in_two(graph: FrozenGraph) -> FrozenGraph:
    """The graph with two reductions in the place of each that is along axes apart."""
    if any(node.op_name.startswith(_BESIDE) for node in graph.nodes):
        return graph
    groups = [*_apart(graph)]
    if not groups:
        return graph
    tensors, nodes, new = [*graph.tensors], list[Node](), dict[tuple[_Apart, TensorId], TensorId]()
    uids = itertools.count(max(t.uid for t in tensors) + 1)

    def virtual(t: FrozenTensor, name: str, **fields: object) -> TensorId:
        tensors.append(replace(t, id=len(tensors), uid=next(uids), name=name, virtual=True, **fields))
        return tensors[-1].id

    for number, node in enumerate(graph.nodes):
        for group in groups:
            read = tuple((port, new.get((group, t), t)) for port, t in node.inputs)
            if number in group.again:
                ((port, t),) = node.outputs
                name = f"{node.name}::{graph.nodes[min(group.numbers)].name}"
                new[group, t] = virtual(graph.tensors[t], f"{name}::{port}")
                nodes.append(replace(node, name=name, inputs=read, outputs=((port, new[group, t]),)))
            elif number in group.own:
                node = replace(node, inputs=read)
            if number in group.numbers:
                (port, t), name = node.inputs[0], f"{node.name}::parts"
                dim = tuple(1 if axis in group.inner else e for axis, e in enumerate(tensors[t].dim))
                parts = virtual(tensors[t], name, dtype=node.compute, dim=dim, stride=packed_stride(dim))
                outputs = ((node.outputs[0][0], parts),)
                axes = tuple(axis for axis, extent in enumerate(dim) if extent == 1)
                nodes.append(_with(replace(node, name=name, outputs=outputs), axes=axes))
                node = _with(replace(node, inputs=((port, parts),)), mode=_AGAIN[node.attribute("mode")])
        nodes.append(node)
    return FrozenGraph(graph.name, tuple(tensors), _read(tensors, nodes))


def _with(node: Node, **attributes: object) -> Node:
    return replace(node, attributes=tuple((dict(node.attributes) | attributes).items()))


def _read(tensors: list[FrozenTensor], nodes: list[Node]) -> tuple[Node, ...]:
    """Nodes without those whose results nobody reads any more."""
    kept, wanted = list[Node](), {t.id for t in tensors if not t.virtual}
    for node in reversed(nodes):
        if any(t in wanted for _, t in node.outputs):
            kept.append(node)
            wanted |= {t for _, t in node.inputs}
    return tuple(reversed(kept))


def _apart(graph: FrozenGraph) -> Iterator[_Apart]:
    found = dict[tuple[int, tuple[int, ...]], list[int]]()
    levels = list[int]()  # of a node, how many nodes that are not pointwise are before it, one behind another
    for number, node in enumerate(graph.nodes):
        before = [graph.producer[t] for _, t in node.inputs if t in graph.producer]
        levels.append(max((levels[n] + (not graph.nodes[n].op.pointwise) for n in before), default=0))
        if inner := _inner(graph, node):
            found.setdefault((levels[number], inner), []).append(number)
    for (_, inner), numbers in found.items():
        before, own = _pointwise_before(graph, numbers), {*numbers}
        for number in sorted(before, reverse=True):
            ((_, t),) = graph.nodes[number].outputs
            if own.issuperset(graph.consumers[t]):
                own.add(number)
        yield _Apart(frozenset(numbers), inner, frozenset(before - own), frozenset(own))


def _inner(graph: FrozenGraph, node: Node) -> tuple[int, ...]:
    """The axes of the first of two reductions; none if the node stays one."""
    if node.op_name != "reduction" or node.attribute("mode") not in _AGAIN or node.compute is not data_type.FLOAT:
        return ()
    if node.attribute("mode") is reduction_mode.AMAX and graph.tensors[node.outputs[0][1]].elements == 1:
        return ()  # which any kernel of rows makes beside
    return _innermost(graph.tensors[node.inputs[0][1]], node.attribute("axes"))


def _innermost(t: FrozenTensor, axes: Collection[int]) -> tuple[int, ...]:
    """Axes, of some, that one stride joins, from that of elements next to each other on; none if these are all."""
    inside = sorted((axis for axis in axes if t.dim[axis] != 1), key=lambda axis: t.stride[axis])
    if not t.elements or not inside or t.stride[inside[0]] != 1:
        return ()
    joined = 1
    while joined < len(inside) and t.stride[inside[joined]] == t.stride[inside[joined - 1]] * t.dim[inside[joined - 1]]:
        joined += 1
    return tuple(inside[:joined]) if joined < len(inside) else ()


def _pointwise_before(graph: FrozenGraph, numbers: Collection[int]) -> set[int]:
    """Pointwise nodes that make what some nodes read, and is not in memory."""
    found, waiting = set[int](), [*numbers]
    while waiting:
        for _, t in graph.nodes[waiting.pop()].inputs:
            before = graph.producer.get(t) if graph.tensors[t].virtual else None
            if before is not None and before not in found and graph.nodes[before].op.pointwise:
                found.add(before)
                waiting.append(before)
    return found
