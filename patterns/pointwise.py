"""Pattern of pointwise nodes without a reduction, with the moves around them that determine where rows lie.

Rows run along the axis of stride 1 of the output.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from graphfuse.contract.engine import No
from graphfuse.contract.match import Match, Pattern, Region, convex, neighbours, single
from graphfuse.op_graph.ir import FrozenGraph, Node
from graphfuse.ops import OPS
from graphfuse.patterns import rows
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.role import PartialMatch
from graphfuse.patterns.roles import ROLES


def _axes(graph: FrozenGraph, anchor: Node) -> Axes:
    """Rows and columns of the output of the node that a match starts from."""
    _, made = anchor.outputs[0]
    t = graph.tensors[made]
    last = len(t.dim) - 1
    return Axes(graph, t.dim, (last if t.packed_axis is None else t.packed_axis,), False)


def grow(match: Match) -> Iterator[frozenset[int]]:
    """Sets of nodes around all pointwise nodes on the rows of the anchor, if the anchor is the first of these.

    There are three kinds: nodes on these rows that start no match of the rows pattern, with nodes that only read the
    same tensors; the same without the latter; pointwise nodes alone."""
    graph, axes = match.graph, _axes(match.graph, match.anchor)
    if _first(graph, graph.nodes, axes) is not match.anchor:
        return

    def may_join(index: int, inside: frozenset[int]) -> bool:
        role = ROLES.get(graph.nodes[index].op_name)
        return role is not None and not role.starts and PartialMatch(axes, inside, ROLES).why_not(index) is None

    def is_pointwise(index: int, inside: frozenset[int]) -> bool:
        return graph.nodes[index].op.pointwise and may_join(index, inside)

    starts = (i for i, node in enumerate(graph.nodes) if node.op.pointwise and _axes(graph, node) == axes)
    left = [frozenset(i for i in starts if may_join(i, frozenset()))] * 3
    ways = ((may_join, (axes.whole,)), (may_join, ()), (is_pointwise, ()))
    for start in sorted(left[0]):
        for n, (joins, more) in enumerate(ways):
            if start in left[n]:
                found = convex(graph, (start,), joins)
                for joins_readers in more:
                    found = convex(graph, found, joins, joins_readers)
                yield found
                # From its other nodes the same set is found, unless a path over other nodes excluded one.
                kept_out = any(joins(i, found) for i in neighbours(graph, found, *more))
                left[n] -= {start} if kept_out else found


def _first(graph: FrozenGraph, nodes: Iterable[Node], axes: Axes) -> Node:
    """The first pointwise node on rows along some axes."""
    return next(node for node in nodes if node.op.pointwise and _axes(graph, node) == axes)


def facts(match: Match) -> rows.RowFacts | No:
    axes = _axes(match.graph, match.anchor)
    return rows.described(replace(match, anchor=_first(match.graph, match.subgraph.nodes, axes)), axes)


def apart(region: Region, others: frozenset[int]) -> str | None:
    graph = region.subgraph.graph
    anchor = next(node for node in graph.nodes if node.name == region.facts.node)
    return rows.apart_on(_axes(graph, anchor), region.subgraph, others)


_TEMPLATES = tuple(single(name) for name, op in OPS.items() if op.pointwise)
PATTERN = Pattern("pointwise", _TEMPLATES, facts, grow, apart, last=True)
