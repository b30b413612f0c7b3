"""Pointwise nodes alone, as rows: those that read a product, a convolution or attention, for where a library runs that
node alone; and any, for who plans a graph of nothing else.

Rows run along the axis in which the elements of what is made touch in memory.
"""

from collections.abc import Iterator

from graphfuse.contract.engine import No
from graphfuse.contract.match import Match, Pattern, convex, single
from graphfuse.ops import OPS
from graphfuse.patterns import rows
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.epilogues import PRODUCTS
from graphfuse.patterns.role import Matched
from graphfuse.patterns.roles import ROLES


def _axes(match: Match) -> Axes:
    """Rows and columns of what the node makes that the match starts from."""
    _, made = match.anchor.outputs[0]
    t = match.graph.tensors[made]
    last = len(t.dim) - 1
    return Axes(match.graph, t.dim, (last if t.packed_axis is None else t.packed_axis,), False)


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All pointwise nodes of its rows around the node of a match, or where that is a product, around one that reads
    it."""
    graph, axes = match.graph, _axes(match)

    def may_join(index: int, inside: frozenset[int]) -> bool:
        return graph.nodes[index].op.pointwise and Matched(axes, inside, ROLES).take(index)

    made, is_pointwise = match.anchor.outputs[0][1], match.anchor.op.pointwise
    for node in match.subgraph.node_ids if is_pointwise else graph.consumers.get(made, ()):
        if may_join(node, frozenset()):
            yield convex(graph, frozenset({node}), may_join)


def facts(match: Match) -> rows.RowFacts | No:
    return rows.described(match, _axes(match))


PATTERN = Pattern("behind", tuple(map(single, (*PRODUCTS, "sdpa"))), facts, grow)

ALONE = Pattern("pointwise", tuple(single(name) for name, op in OPS.items() if op.pointwise), facts, grow)
"""Not among those that every graph is planned with: a graph of norms has no use of it."""
