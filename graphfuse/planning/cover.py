"""Chooses which matches of a graph are fused: those that together save the most bytes. Pure functions.

A match saves the bytes that its nodes move as one kernel each, less those that they move as one kernel (``traffic``).
Matches of a choice share no node, and their dependencies form no cycle. Of choices that save equally, the one with the
first match wins, then the one with the second, and so on. So every match that does not overlap the others is chosen,
even if it saves nothing.

The search is dynamic programming over the nodes. Its state is the set of later nodes that are already covered, which is
small in graphs of models. Groups of matches that do not overlap are searched separately. Cycles are rare. A second
search, over whole choices and heaviest first, resolves them: it tries to omit each match of a cycle. Both searches
count steps. Above a limit, matches are chosen greedily, the largest saving first.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from graphfuse.op_graph.ir import FrozenGraph, Subgraph
from graphfuse.planning import traffic

MOST_STEPS = 50_000
"""Number of steps, each of about a microsecond, after which the search is given up for the greedy choice."""


@dataclass(frozen=True)
class Cover:
    """A choice of matches, by their numbers.

    saved: bytes. waiting: matches that overlap no chosen one, but whose dependencies would form a cycle, with chosen
    matches or alone. steps: of the search. exact: whether the search was finished, so that no other choice saves more.
    """

    chosen: tuple[int, ...]
    saved: int
    waiting: tuple[int, ...]
    steps: int
    exact: bool


def choose(
    graph: FrozenGraph,
    matches: Sequence[Subgraph],
    accepted: Callable[[int], bool],
    most_nodes: bool = False,
    last: int = 0,
    most_steps: int = MOST_STEPS,
) -> Cover:
    """The best choice of `matches`. Among choices that save equally, those with earlier matches are preferred.

    accepted: whether an engine accepts a match; called only for matches that would be chosen. most_nodes: whether the
    number of covered nodes counts before bytes, for when no engine runs the other nodes. last: the number of matches at
    the end that are only for nodes that no other match covers; the bytes that these save do not count.
    """
    search = _Search(graph, matches, most_nodes, last)
    left, refused, chosen = frozenset(search.convex), set(), None
    while search.steps <= most_steps:
        found = next(search.ranked(left, most_steps), None)
        if found is None:
            break
        declined = {m for m in found if not accepted(m)}
        if not declined:
            chosen = found
            break
        refused |= declined
        left -= declined
    exact = chosen is not None
    if chosen is None:
        chosen = []
        for m in sorted(left, key=search.weights.__getitem__, reverse=True):
            if search.fits(m, chosen) and not search.circle([*chosen, m]) and accepted(m):
                chosen.append(m)
    waiting = tuple(
        m
        for m in range(len(matches))
        if m not in chosen and m not in refused and search.fits(m, chosen)
        if m not in search.convex or search.circle([*chosen, m])
    )
    return Cover(tuple(sorted(chosen)), sum(search.saved[m] for m in chosen), waiting, search.steps, exact)


def ranked(graph: FrozenGraph, matches: Sequence[Subgraph], most_steps: int = MOST_STEPS) -> Iterator[tuple[int, ...]]:
    """Every choice of `matches`, best first, each once, including choices that could have more matches.

    It ends early after `most_steps` steps."""
    search = _Search(graph, matches)
    yield from search.ranked(frozenset(search.convex), most_steps)


_Entry = tuple[int, int, frozenset[int], frozenset[int], tuple[int, ...]]
"""Entry of a queue of sets of choices: two numbers to sort by, the matches to choose from, those of them that every
choice of the set has (no other one overlaps them), and the heaviest choice."""


class _Search:
    """Search for the heaviest choices. A set of nodes is a number whose bit i stands for node i.

    nodes: of each match. needs: nodes outside of each match that it depends on. weights: no two choices have the same
    sum, so that the heaviest is unique. steps: the number so far.
    """

    def __init__(self, graph: FrozenGraph, matches: Sequence[Subgraph], most_nodes: bool = False, last: int = 0):
        alone = [traffic.of_node(graph, node).total for node in graph.nodes]
        self.saved = [sum(alone[i] for i in m.node_ids) - traffic.fused(m).total for m in matches]
        self.nodes = [sum(1 << i for i in m.node_ids) for m in matches]
        self.needs, self.convex = [], []
        for n, m in enumerate(matches):
            before, after = 0, 0
            for i in m.node_ids:
                before, after = before | graph.ancestors[i], after | graph.descendants[i]
            self.needs.append(before & ~self.nodes[n])
            if m.node_ids and not before & after & ~self.nodes[n]:
                self.convex.append(n)
        # From the highest digits down: nodes, if these count first; bytes; one bit for each match, the first highest.
        count, bytes_ = len(matches), sum(self.saved).bit_length()
        covered = [len(m.node_ids) << bytes_ if most_nodes else 0 for m in matches]
        counted = [*self.saved[: count - last], *(0,) * last]
        self.weights = [((covered[n] + counted[n]) << count) + (1 << (count - 1 - n)) for n in range(count)]
        self.steps = 0
        self._known: dict[frozenset[int], tuple[int, ...]] = {}

    def fits(self, match: int, chosen: Collection[int]) -> bool:
        """True if a match shares no node with the chosen ones."""
        return all(not self.nodes[match] & self.nodes[m] for m in chosen)

    def circle(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Chosen matches whose dependencies form a cycle; empty if there is no cycle."""
        left = sorted(chosen, key=lambda m: self._first(m))
        while left:
            open_, waiting = sum(self.nodes[m] for m in left), []
            for m in left:
                if self.needs[m] & open_:
                    waiting.append(m)
                else:
                    open_ &= ~self.nodes[m]
            if len(waiting) == len(left):
                break
            left = waiting
        if not left:
            return ()
        way = [left[0]]
        while True:
            needed = next(m for m in left if self.nodes[m] & self.needs[way[-1]])
            if needed in way:
                return tuple(way[way.index(needed) :])
            way.append(needed)

    def ranked(self, left: frozenset[int], most_steps: int) -> Iterator[tuple[int, ...]]:
        """Choices of `left` without cycles, heaviest first, until `steps` is more than `most_steps`."""
        waiting = [self._entry(left, frozenset(), most_steps)]
        while waiting and waiting[0] is not None and self.steps <= most_steps:
            *_, left, kept, chosen = heapq.heappop(waiting)
            circle = self.circle(chosen)
            if not circle:
                yield chosen
            # Every other choice is in one of these sets: without the first, with it but without the second, ...
            for m in circle or chosen:
                if m not in kept:
                    entry = self._entry(left - {m}, kept, most_steps)
                    if entry is None:
                        return
                    heapq.heappush(waiting, entry)
                    kept |= {m}
                    left = frozenset(o for o in left if o == m or not self.nodes[o] & self.nodes[m])

    def _entry(self, left: frozenset[int], kept: frozenset[int], most_steps: int) -> _Entry | None:
        """The heaviest choice of `left`, which may have cycles; None beyond the limit of steps."""
        self.steps += 1
        chosen: list[int] = []
        for group in self._groups(left):
            if group not in self._known:
                found = self._heaviest(group, most_steps)
                if found is None:
                    return None
                self._known[group] = found
            chosen += self._known[group]
        return -sum(self.weights[m] for m in chosen), self.steps, left, kept, tuple(sorted(chosen))

    def _groups(self, left: Collection[int]) -> list[frozenset[int]]:
        """Groups of matches that overlap, directly or through other matches."""
        groups: list[tuple[int, list[int]]] = []
        for m in sorted(left, key=self._first):
            nodes, members, apart = self.nodes[m], [m], []
            for group in groups:
                if group[0] & nodes:
                    nodes, members = nodes | group[0], members + group[1]
                else:
                    apart.append(group)
            groups = [*apart, (nodes, members)]
        return [frozenset(members) for _, members in groups]

    def _heaviest(self, group: frozenset[int], most_steps: int) -> tuple[int, ...] | None:
        """The heaviest matches of which no two overlap; None beyond the limit of steps."""
        starting: dict[int, list[int]] = {}
        for m in sorted(group):
            starting.setdefault(self._first(m), []).append(m)
        # Covered nodes -> the weight of the best choice that covers them, and its matches, the last first.
        states: dict[int, tuple[int, tuple]] = {0: (0, ())}
        for first in sorted(starting):
            reached: dict[int, tuple[int, tuple]] = {}
            for covered, (weight, way) in states.items():
                covered = covered >> first << first  # no later match has a node before `first`
                options = [(covered, weight, way)]
                for m in starting[first]:
                    if not covered & self.nodes[m]:
                        options.append((covered | self.nodes[m], weight + self.weights[m], (m, way)))
                for nodes, sum_, steps in options:
                    if nodes not in reached or reached[nodes][0] < sum_:
                        reached[nodes] = sum_, steps
                self.steps += len(options)
                if self.steps > most_steps:
                    return None
            states = reached
        _, way = max(states.values(), key=lambda state: state[0])
        chosen = []
        while way:
            m, way = way
            chosen.append(m)
        return tuple(chosen)

    def _first(self, match: int) -> int:
        """The first node of a match."""
        return (self.nodes[match] & -self.nodes[match]).bit_length() - 1
