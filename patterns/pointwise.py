"""Nodes that reduce nothing, as rows: pointwise nodes, and the moves around them that say where rows lie.

Rows run along the axis in which the elements of what is made touch in memory.
"""

from collections.abc import Iterator

from graphfuse.contract.engine import No
from graphfuse.contract.match import Match, Pattern, Region, convex, single
from graphfuse.op_graph.ir import FrozenGraph, Node
from graphfuse.ops import OPS
from graphfuse.patterns import rows
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.role import Matched
from graphfuse.patterns.roles import ROLES


def _axes(graph: FrozenGraph, anchor: Node) -> Axes:
    """Rows and columns of what the node makes that a match starts from."""
    _, made = anchor.outputs[0]
    t = graph.tensors[made]
    last = len(t.dim) - 1
    return Axes(graph, t.dim, (last if t.packed_axis is None else t.packed_axis,), False)


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All around a pointwise node that works on its rows and starts no match of rows, with what only reads the same
    rows, and without; pointwise nodes alone."""
    graph, axes = match.graph, _axes(match.graph, match.anchor)

    def may_join(index: int, inside: frozenset[int]) -> bool:
        role = ROLES.get(graph.nodes[index].op_name)
        return role is not None and not role.starts and Matched(axes, inside, ROLES).why_not(index) is None

    def is_pointwise(index: int, inside: frozenset[int]) -> bool:
        return graph.nodes[index].op.pointwise and may_join(index, inside)

    core = frozenset(match.subgraph.node_ids)
    if may_join(*core, frozenset()):
        around = convex(graph, core, may_join)
        yield convex(graph, around, may_join, axes.whole)
        yield around
        yield convex(graph, core, is_pointwise)


def facts(match: Match) -> rows.RowFacts | No:
    return rows.described(match, _axes(match.graph, match.anchor))


def apart(region: Region, others: frozenset[int]) -> str | None:
    graph = region.subgraph.graph
    anchor = next(node for node in graph.nodes if node.name == region.facts.node)
    return rows.apart_on(_axes(graph, anchor), region.subgraph, others)


_TEMPLATES = tuple(single(name) for name, op in OPS.items() if op.pointwise)
PATTERN = Pattern("pointwise", _TEMPLATES, facts, grow, apart, last=True)
