"""Pointwise nodes alone, as rows: those that read a product, a convolution or attention, for where a library runs that
node alone; and any, for who plans a graph of nothing else.

Rows run along the axis in which the elements of what is made touch in memory.
"""

from collections.abc import Iterator

from graphfuse.contract.engine import No
from graphfuse.contract.match import Match, Pattern, Region, convex, single
from graphfuse.op_graph.ir import FrozenGraph, Node
from graphfuse.ops import OPS
from graphfuse.patterns import rows
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.epilogues import PRODUCTS
from graphfuse.patterns.role import Matched
from graphfuse.patterns.roles import ROLES


def _axes(graph: FrozenGraph, anchor: Node) -> Axes:
    """Rows and columns of what the node makes that a match starts from."""
    _, made = anchor.outputs[0]
    t = graph.tensors[made]
    last = len(t.dim) - 1
    return Axes(graph, t.dim, (last if t.packed_axis is None else t.packed_axis,), False)


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All pointwise nodes of its rows around the node of a match, or where that is a product, around one that reads
    it."""
    graph, axes = match.graph, _axes(match.graph, match.anchor)

    def may_join(index: int, inside: frozenset[int]) -> bool:
        return graph.nodes[index].op.pointwise and Matched(axes, inside, ROLES).why_not(index) is None

    made, is_pointwise = match.anchor.outputs[0][1], match.anchor.op.pointwise
    for node in match.subgraph.node_ids if is_pointwise else graph.consumers.get(made, ()):
        if may_join(node, frozenset()):
            yield convex(graph, frozenset({node}), may_join)


def facts(match: Match) -> rows.RowFacts | No:
    return rows.described(match, _axes(match.graph, match.anchor))


def apart(region: Region, others: frozenset[int]) -> str | None:
    graph = region.subgraph.graph
    anchor = next(node for node in graph.nodes if node.name == region.facts.node)
    return rows.apart_on(_axes(graph, anchor), region.subgraph, others)


PATTERN = Pattern("behind", tuple(map(single, (*PRODUCTS, "sdpa"))), facts, grow, apart)

ALONE = Pattern("pointwise", tuple(single(name) for name, op in OPS.items() if op.pointwise), facts, grow, apart)
"""Not among those that every graph is planned with: a graph of norms has no use of it."""
