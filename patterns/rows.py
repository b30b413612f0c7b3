"""Pattern of reductions of rows, with the operations on the same rows around them, forward and backward.

It matches norms, as one node or many; softmax; cross entropy and its gradient, which reduces nothing; pointwise nodes
before and after; quantization in blocks; and the largest magnitude of a tensor. Any intermediate may be an output.
Quantization in blocks, the rotation of pairs and rows written by number also match without a reduction, with the
pointwise nodes before them. Other nodes determine where rows lie: gathers by number, joins, slices.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.contract.engine import No
from graphfuse.contract.match import Match, Pattern, Region, convex, neighbours, single
from graphfuse.op_graph.ir import FrozenGraph, Subgraph
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.builder import Builder
from graphfuse.patterns.role import PartialMatch
from graphfuse.patterns.roles import ROLES
from graphfuse.rows.program import RowProgram


@dataclass(frozen=True)
class RowFacts:
    """Facts of a match as rows x columns: all that an engine may use.

    node: the name of the node that the match starts from, for messages. row_extents: extents of the row axes, at least
    one, outermost first; adjacent axes are merged if one stride serves both in every tensor. columns: columns of a row.
    program: the computation and its outputs, including sums over all rows.
    """

    node: str
    row_extents: tuple[int, ...]
    columns: int
    program: RowProgram

    @property
    def rows(self) -> int:
        return math.prod(self.row_extents)


def grow(match: Match) -> Iterator[frozenset[int]]:
    """Sets of nodes around a reduction that work on its rows, largest first.

    They are: with the norms that follow; without other norms; without the nodes before; without the nodes after. Each
    has three forms: with nodes that only read the same tensors, without these, and without nodes whose results only
    nodes outside read. Nodes between two norms belong to the first, as the second reads from memory anyway; but not
    nodes after a product or another op that does not work on rows, which the first norm cannot reach. Around an op that
    reduces nothing, such as quantization, the sets have no reductions: the set of a reduction includes both."""
    graph, center = match.graph, match.anchor
    core, role = frozenset(match.subgraph.node_ids), ROLES[center.op_name]
    axes = role.axes(graph, center)
    if axes is None:
        return
    roles = [(i, ROLES[node.op_name]) for i, node in enumerate(graph.nodes) if node.op_name in ROLES]

    def grown(out: frozenset[int]) -> Iterator[frozenset[int]]:
        def may_join(i: int, inside: frozenset[int]) -> bool:
            return i not in out and PartialMatch(axes, inside, ROLES).why_not(i) is None

        around = convex(graph, core, may_join)
        wide = convex(graph, around, may_join, axes.whole)
        yield wide
        yield around
        yield _without_ends(graph, wide)

    if role.alone:
        yield from grown(frozenset(i for i, found in roles if found.reduces(axes, graph.nodes[i])))
        yield core
        return
    broadcast = role.expansion.scalars | role.expansion.of_columns if role.expansion else ()
    before = graph.above(t for port, t in center.inputs if port not in broadcast)
    after = graph.below(t for _, t in center.outputs)
    forward = not axes.sums and role.expansion is not None
    norms = frozenset(i for i, found in roles if found.expansion and found.reduces(axes, graph.nodes[i])) - core
    first = before & norms if forward else frozenset()
    of_first = first | before & _reachable(graph, first)
    for excluded in (of_first, of_first | norms, before | norms, after | of_first | norms):
        yield from grown(excluded)
    yield core


def _without_ends(graph: FrozenGraph, nodes: frozenset[int]) -> frozenset[int]:
    """The set without pointwise nodes and moves whose results only nodes outside read."""
    for i in sorted(nodes, reverse=True):
        node = graph.nodes[i]
        made = [t for _, t in node.outputs]
        ends = all(graph.tensors[t].virtual and nodes.isdisjoint(graph.consumers.get(t, ())) for t in made)
        if ends and not ROLES[node.op_name].starts:
            nodes -= {i}
    return nodes


def _reachable(graph: FrozenGraph, norms: frozenset[int]) -> frozenset[int]:
    """The nodes that depend on one of `norms`, and only through ops that may work on rows."""
    below = graph.below(t for i in norms for _, t in graph.nodes[i].outputs)
    others = {i for i in below if graph.nodes[i].op_name not in ROLES}
    return frozenset(below - others - graph.below(t for i in others for _, t in graph.nodes[i].outputs))


def facts(match: Match) -> RowFacts | No:
    """The match as rows x columns; No if a tensor cannot be viewed so."""
    return described(match, ROLES[match.anchor.op_name].axes(match.graph, match.anchor))


def described(match: Match, axes: Axes) -> RowFacts | No:
    """Facts of a match on rows along these axes; No if there are none."""
    made = Builder(match.subgraph, axes).build()
    if isinstance(made, No):
        return made
    extents, program = made
    return RowFacts(match.anchor.name, extents, axes.width, program)


def apart(region: Region, others: frozenset[int]) -> str | None:
    """Reason why neighbours of a region among `others` are not in it; None if unknown."""
    anchor = next(node for node in region.subgraph.nodes if node.name == region.facts.node)
    return apart_on(ROLES[anchor.op_name].axes(region.subgraph.graph, anchor), region.subgraph, others)


def apart_on(axes: Axes, inside: Subgraph, others: frozenset[int]) -> str | None:
    """Result of ``apart`` for nodes on rows along these axes."""
    graph, matched = inside.graph, PartialMatch(axes, frozenset(inside.node_ids), ROLES)
    found = sorted(others & neighbours(graph, matched.inside, axes.whole))
    if not found:
        return f"they pass nothing on, and what both read has not all {axes}"
    reasons = ((graph.nodes[i], matched.why_not(i)) for i in found)
    return next((f"{node} {why}" for node, why in reasons if why is not None), None)


PATTERN = Pattern("rows", tuple(single(name) for name, role in ROLES.items() if role.starts), facts, grow, apart)
