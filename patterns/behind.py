"""Pointwise nodes that read a product, a convolution or attention, as rows: for where a library runs that node alone.

Rows run along the axis in which the product's elements touch in memory.
"""

from collections.abc import Iterator

from graphfuse.contract.engine import No
from graphfuse.contract.match import Match, Pattern, convex, single
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
    """All pointwise nodes of the product's rows around one that reads it."""
    graph, axes = match.graph, _axes(match)

    def may_join(index: int, inside: frozenset[int]) -> bool:
        return graph.nodes[index].op.pointwise and Matched(axes, inside, ROLES).take(index)

    for reader in graph.consumers.get(match.anchor.outputs[0][1], ()):
        if may_join(reader, frozenset()):
            yield convex(graph, frozenset({reader}), may_join)


def facts(match: Match) -> rows.RowFacts | No:
    return rows.described(match, _axes(match))


PATTERN = Pattern("behind", tuple(map(single, (*PRODUCTS, "sdpa"))), facts, grow)
