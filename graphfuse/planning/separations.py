"""Reasons why a plan has several parts: for each two that have a tensor in common, why they are not one region."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from graphfuse.contract.match import Declined, Pattern, Region
from graphfuse.op_graph.ir import FrozenGraph, Subgraph
from graphfuse.planning import guard, traffic
from graphfuse.planning.plan import Part, Proposal

_MOST = 8
"""Number of nodes that a reason names at most."""


@dataclass(frozen=True)
class Separation:
    """Two parts of a plan, by number, and why the first is not fused with the second. "They" in `why` is the first."""

    part: int
    other: int
    why: str


@dataclass(frozen=True)
class Separations:
    """Finder of separations in the results of planning: matches with and without facts, and answers of engines."""

    graph: FrozenGraph
    patterns: Sequence[Pattern]
    regions: Sequence[Region]
    declined: Sequence[Declined]
    proposals: Sequence[Proposal]

    def between(self, parts: Sequence[Part]) -> Iterator[Separation]:
        """A reason for each two parts that have a tensor in common, unless both are run node by node.

        A part that has no tensor in common with any before it gets one reason that says so."""
        for j, part in enumerate(parts):
            common = [i for i in range(j) if self._common(parts[i].region.subgraph, part.region.subgraph)]
            for i in common:
                if parts[i].region.pattern or part.region.pattern:
                    yield self._between(i, parts[i].region, j, part.region)
            if j and not common:
                yield Separation(j - 1, j, "they have no tensor in common")

    def _common(self, one: Subgraph, other: Subgraph) -> bool:
        common = {*one.inputs, *one.outputs} & {*other.inputs, *other.outputs}
        return any(traffic.nbytes(self.graph.tensors[t]) for t in common)

    def _between(self, i: int, one: Region, j: int, other: Region) -> Separation:
        first, second = frozenset(one.subgraph.node_ids), frozenset(other.subgraph.node_ids)
        why = self._why_not_fused(first | second)
        if why is None:
            for n, m, region, others in ((i, j, one, second), (j, i, other, first)):
                found = self._of_pattern(region, others)
                if found is not None:
                    return Separation(n, m, found)
            why = self._runs_between(first | second) or "no pattern matches nodes of both"
        return Separation(i, j, why)

    def _why_not_fused(self, nodes: frozenset[int]) -> str | None:
        """Why the smallest match that has all of `nodes` was not chosen; None if there is no such match.

        Matches of patterns that come last (``Pattern.last``) are considered only if there are no others."""
        matches = [m for m in (*self.regions, *self.declined) if nodes <= {*m.subgraph.node_ids}]
        some = [m for m in matches if not isinstance(m, Region) or not m.last] or matches
        m = min(some, key=lambda m: len(m.subgraph.node_ids), default=None)
        if m is None:
            return None
        names = _names(self.graph, m.subgraph.node_ids)
        if isinstance(m, Region) and m.last:
            return f"as one, {names} would be of pattern {m.pattern}, which has what no other pattern takes"
        if isinstance(m, Declined):
            return f"pattern {m.pattern} fits {names}, but {m.why}"
        verdicts = [v for p in self.proposals for v in p.verdicts if v.region.subgraph == m.subgraph]
        if verdicts and all(v.why is not None for v in verdicts):
            return f"{verdicts[0].engine} declines {names}: {verdicts[0].why}"
        saved = traffic.unfused(m.subgraph).total - traffic.fused(m.subgraph).total
        return f"as one, {names} would save {saved} bytes; no choice with it saves more than what is chosen"

    def _of_pattern(self, region: Region, others: frozenset[int]) -> str | None:
        for pattern in self.patterns:
            if pattern.name == region.pattern and pattern.apart is not None:
                return guard.call(pattern, region.subgraph, "apart", pattern.apart, region, others)
        return None

    def _runs_between(self, nodes: frozenset[int]) -> str | None:
        """Text with the names of the nodes that run after some of `nodes` and before others; None if there are none."""
        both = Subgraph(self.graph, tuple(sorted(nodes)))
        between = self.graph.below(both.outputs) & self.graph.above(both.inputs)
        return f"what runs between them: {_names(self.graph, between)}" if between else None


def _names(graph: FrozenGraph, nodes: Collection[int]) -> str:
    names = [repr(graph.nodes[i].name) for i in sorted(nodes)]
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
