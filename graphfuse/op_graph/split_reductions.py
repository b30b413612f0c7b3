"""A rewrite of the frozen graph: a reduction along axes that are not contiguous in memory becomes two.

The first is along the contiguous axes, which are the rows of a kernel. The second is along the other axes, of the small
result of the first. Pointwise nodes before it that other nodes read, too, are computed again in its kernel.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, TensorId, packed_stride

_PRODUCTS = ("matmul", "conv", "sdpa")
"""Prefixes of the names of products, with which libraries compute the reduction after them."""
_SECOND_MODES = {mode: mode for mode in reduction_mode if mode.name in ("ADD", "MIN", "MAX", "AMAX", "AVG")}
_SECOND_MODES[reduction_mode.NORM1] = reduction_mode.ADD
"""Mode of the first reduction -> mode of the second. NORM2 has none: a root would come between."""


@dataclass(frozen=True)
class _Split:
    """Reductions that become two each, with the first ones in one kernel.

    numbers: the reductions, by index of their nodes.
    inner: the axes of the first reductions.
    again: nodes that are computed again for these reductions.
    own: nodes that only these reductions need, including themselves.
    """

    numbers: frozenset[int]
    inner: tuple[int, ...]
    again: frozenset[int]
    own: frozenset[int]


def split_reductions(graph: FrozenGraph) -> FrozenGraph:
    """The graph with each reduction along axes that are not contiguous replaced by two."""
    if any(node.op_name.startswith(_PRODUCTS) for node in graph.nodes):
        return graph
    groups = [*_splits(graph)]
    if not groups:
        return graph
    tensors, nodes, new = [*graph.tensors], list[Node](), dict[tuple[_Split, TensorId], TensorId]()
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
                node = _with(replace(node, inputs=((port, parts),)), mode=_SECOND_MODES[node.attribute("mode")])
        nodes.append(node)
    return FrozenGraph(graph.name, tuple(tensors), _needed(tensors, nodes))


def _with(node: Node, **attributes: object) -> Node:
    return replace(node, attributes=tuple((dict(node.attributes) | attributes).items()))


def _needed(tensors: list[FrozenTensor], nodes: list[Node]) -> tuple[Node, ...]:
    """The nodes without those whose results are not read any more."""
    kept, read = list[Node](), {t.id for t in tensors if not t.virtual}
    for node in reversed(nodes):
        if any(t in read for _, t in node.outputs):
            kept.append(node)
            read |= {t for _, t in node.inputs}
    return tuple(reversed(kept))


def _splits(graph: FrozenGraph) -> Iterator[_Split]:
    found = dict[tuple[int, tuple[int, ...]], list[int]]()
    levels = list[int]()  # of each node: the most nodes that are not pointwise on a path to it
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
        yield _Split(frozenset(numbers), inner, frozenset(before - own), frozenset(own))


def _inner(graph: FrozenGraph, node: Node) -> tuple[int, ...]:
    """The axes of the first of two reductions; empty if the node is not divided."""
    if (
        node.op_name != "reduction"
        or node.attribute("mode") not in _SECOND_MODES
        or node.compute is not data_type.FLOAT
    ):
        return ()
    if node.attribute("mode") is reduction_mode.AMAX and graph.tensors[node.outputs[0][1]].elements == 1:
        return ()  # any kernel of rows can compute it in addition
    return _innermost(graph.tensors[node.inputs[0][1]], node.attribute("axes"))


def _innermost(t: FrozenTensor, axes: Collection[int]) -> tuple[int, ...]:
    """The innermost of `axes` that are contiguous in memory; empty if there are none or if all are."""
    inside = sorted((axis for axis in axes if t.dim[axis] != 1), key=lambda axis: t.stride[axis])
    if not t.elements or not inside or t.stride[inside[0]] != 1:
        return ()
    joined = 1
    while joined < len(inside) and t.stride[inside[joined]] == t.stride[inside[joined - 1]] * t.dim[inside[joined - 1]]:
        joined += 1
    return tuple(inside[:joined]) if joined < len(inside) else ()


def _pointwise_before(graph: FrozenGraph, numbers: Collection[int]) -> set[int]:
    """Pointwise nodes that some nodes depend on by virtual tensors and pointwise nodes alone."""
    found, waiting = set[int](), [*numbers]
    while waiting:
        for _, t in graph.nodes[waiting.pop()].inputs:
            before = graph.producer.get(t) if graph.tensors[t].virtual else None
            if before is not None and before not in found and graph.nodes[before].op.pointwise:
                found.add(before)
                waiting.append(before)
    return found
