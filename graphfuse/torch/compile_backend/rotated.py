"""Puts the operator in place of queries and keys that are normalized and rotated.

It reads a table of cosines and sines by positions. Here the table is made of those of the tokens, and a token's
position is its row of it. Both are made once for all layers.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.torch.compile_backend.rotation import OPERATOR, Pair, Rotation
from graphfuse.torch.fusion.meaning import dtype, same, value
from graphfuse.torch.fusion.new_nodes import permuted, put, record
from graphfuse.torch.regions.replace import erase_unread

aten, prims = torch.ops.aten, torch.ops.prims

Tables = dict[tuple[Node, Node], tuple[Node, Node]]


def replace(module: GraphModule, pairs: Sequence[Pair]) -> None:
    """Replaces pairs of this graph. What nobody reads any more goes."""
    graph, tables = module.graph, Tables()
    for pair in pairs:
        order = {node: place for place, node in enumerate(graph.nodes)}
        key = pair.q.cos, pair.q.sin
        if key not in tables:
            tables[key] = _table(graph, *key, max(key, key=order.__getitem__))
        with graph.inserting_before(min((pair.q.out, pair.k.out), key=order.__getitem__)):
            _put(graph, pair, *tables[key])
    if pairs:
        erase_unread(graph)
        module.recompile()


def _put(graph: Graph, pair: Pair, table: Node, positions: Node) -> None:
    both = (pair.q, pair.k)
    tensors = [_heads_last(graph, r) for r in both]
    weights = [_weight(graph, r) for r in both]
    call: Callable[..., object] = getattr(torch.ops.graphfuse, OPERATOR).default
    of_tokens = _for_all(graph, positions, tensors[0])
    made = graph.call_function(call, (*tensors, *weights, table, of_tokens, pair.q.norm.eps, True))
    for i, (rotation, given) in enumerate(zip(both, tensors, strict=True)):
        result = graph.call_function(operator.getitem, (made, i))
        record(result, given, lambda t: t.new_empty(t.shape))
        result = permuted(graph, result, [_places(rotation).index(d) for d in range(len(rotation.order))])
        if "stack_trace" in rotation.out.meta:
            result.meta["stack_trace"] = rotation.out.meta["stack_trace"]
        rotation.out.replace_all_uses_with(result)


def _places(rotation: Rotation) -> list[int]:
    """The dimensions of what is rotated in the operator's order: heads before columns."""
    last = len(rotation.order) - 1
    return [*(d for d in range(last) if d != rotation.axis), rotation.axis, last]


def _heads_last(graph: Graph, rotation: Rotation) -> Node:
    return permuted(graph, rotation.norm.x, [rotation.order[d] for d in _places(rotation)])


def _weight(graph: Graph, rotation: Rotation) -> Node:
    weight = rotation.norm.weight
    if not rotation.norm.from_one:
        return weight
    if dtype(weight) is not torch.float32:
        weight = put(graph, aten.to.dtype, weight, torch.float32)
    return put(graph, aten.add.Tensor, weight, 1.0)


def _table(graph: Graph, cos: Node, sin: Node, behind: Node) -> tuple[Node, Node]:
    """Cosines and sines of half a row of each token, and the numbers of the tokens' rows."""
    *tokens, columns = value(cos).shape
    with graph.inserting_before(behind.next):
        halves = [put(graph, aten.slice.Tensor, t, len(tokens), 0, columns // 2) for t in (cos, sin)]
        table = put(graph, aten.view.default, put(graph, aten.cat.default, halves, -1), [-1, columns])
        extents = [_extent(graph, cos, d) for d in range(len(tokens))]
        count = extents[0]
        for extent in extents[1:]:
            count = _product(graph, count, extent)
        numbers = graph.call_function(
            aten.arange.default, (count,), {"dtype": torch.int64, "device": value(cos).device, "pin_memory": False}
        )
        record(numbers, cos, lambda t: t.new_empty(t.shape[:-1], dtype=torch.int64).view(-1))
        return table, put(graph, aten.view.default, numbers, extents)


def _for_all(graph: Graph, positions: Node, q: Node) -> Node:
    """Positions of every sample, where all samples have the same."""
    wanted = value(q).shape[:-2]
    if all(map(same, value(positions).shape, wanted)):
        return positions
    extents = [_extent(graph, q, d) for d in range(len(wanted))]
    return put(graph, aten.clone.default, put(graph, aten.expand.default, positions, extents))


def _extent(graph: Graph, node: Node, dim: int) -> int | Node:
    found = value(node).shape[dim]
    return found if isinstance(found, int) else put(graph, aten.sym_size.int, node, dim)


def _product(graph: Graph, a: int | Node, b: int | Node) -> int | Node:
    return a * b if isinstance(a, int) and isinstance(b, int) else put(graph, operator.mul, a, b)
