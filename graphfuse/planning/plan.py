"""Plans of a lowered graph, and the functions that make and rank them. Pure functions; nothing is compiled here.

`matches` finds the regions of patterns. `propose` queries engines, chooses regions, and ranks plans of one mode.
"""

import graphlib
import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, islice
from types import MappingProxyType
from typing import TypeVar

from graphfuse.base.device import EMULATOR, Device
from graphfuse.base.enums import behavior_note, heur_mode, numerical_note
from graphfuse.base.errors import GraphNotSupportedError, PluginError
from graphfuse.contract.engine import Engine, Launch, No, Outline, knobs_to_dict
from graphfuse.contract.match import Declined, Pattern, Region
from graphfuse.op_graph import verify
from graphfuse.op_graph.ir import FrozenGraph, Subgraph, TensorId
from graphfuse.planning import cover, guard, workspace
from graphfuse.planning.registry import Origin, Registry
from graphfuse.tuned_tables.ranking import RANKING, Rank, rank
from graphfuse.tuned_tables.tunings import Tunings

MOST_PARTITIONS = 500
"""Number of partitions, those that save most bytes first, that are tried for one that a user's engines run."""

_OF_ALL = frozenset({behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API, numerical_note.STRICT_NAN_PROP})
"""Favorable notes: a plan has one of these if all its parts have it, and any other note if one of its parts has it."""

NoteT = TypeVar("NoteT", behavior_note, numerical_note)

_CIRCLE = No("it and another region would wait for each other")

_NOTHING = No("it was not asked: no nodes remain for it")
_OFF = No("it was not asked: it is turned off in the environment")

_EMULATED = "emulator: kernels run as C++ on the CPU; what a GPU approximates is the C library's function"


@dataclass(frozen=True)
class Verdict:
    """Answer of one engine for one region in one mode. why: None if the engine can run the region."""

    region: Region
    engine: str
    why: No | None


@dataclass(frozen=True)
class Part:
    """One region with the engine and knobs that run it. why: where the knobs come from, as text; empty if there was no
    choice."""

    region: Region
    engine: Engine
    knobs: object
    why: str = field(default="", compare=False)

    @property
    def facts(self) -> object:
        return facts_for(self.engine, self.region)

    @cached_property
    def outline(self) -> Outline | Launch:
        return self.engine.outline(self.facts, self.knobs)

    @property
    def name(self) -> str:
        knobs = ", ".join(f"{k}={v}" for k, v in sorted(knobs_to_dict(self.knobs).items()))
        return f"{self.engine.name}[{knobs}]" if knobs else self.engine.name


@dataclass(frozen=True)
class Plan:
    """Parts in running order. placed: tensor id -> byte offset in the workspace. scratch: byte offset of each part's
    scratch memory in the workspace."""

    parts: tuple[Part, ...]
    placed: Mapping[TensorId, int] = field(repr=False)
    scratch: tuple[int, ...]
    workspace_bytes: int
    device: Device = field(repr=False)

    @property
    def emulated(self) -> bool:
        """True if kernels run on the CPU."""
        return self.device.kind == EMULATOR.kind and any(part.engine.emulated for part in self.parts)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Numerical notes of the engines as text. They are computed on demand, as few plans need them."""
        found = dict.fromkeys(n for p in self.parts for n in p.engine.notes(p.facts, p.knobs, self.device))
        return (*found, _EMULATED) if self.emulated else tuple(found)

    @property
    def behavior_notes(self) -> frozenset[behavior_note]:
        """Behavior notes of the whole plan. Only on CUDA devices, a CUDA graph can capture it."""
        found = _joined_notes([p.engine.behavior_notes_of(p.facts, p.knobs, self.device) for p in self.parts])
        return found if self.device.kind == "cuda" else found - {behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API}

    @property
    def numerical_notes(self) -> frozenset[numerical_note]:
        """Numerical notes of the whole plan."""
        return _joined_notes([p.engine.numerical_notes_of(p.facts, p.knobs, self.device) for p in self.parts])

    @property
    def sources(self) -> tuple[str, ...]:
        """The CUDA C++ text of each kernel, in running order."""
        return tuple(text for part in self.parts for text in part.engine.sources(part.facts, part.knobs))

    @property
    def name(self) -> str:
        return ("emulator: " if self.emulated else "") + " + ".join(part.name for part in self.parts)

    @property
    def engine_and_knobs(self) -> tuple[object, object]:
        names = tuple(part.engine.name for part in self.parts)
        knobs = tuple(knobs_to_dict(part.knobs) for part in self.parts)
        return (names[0], knobs[0]) if len(self.parts) == 1 else (names, knobs)

    @cached_property
    def in_place(self) -> frozenset[tuple[TensorId, TensorId]]:
        """Pairs of (input, output) tensors that may share memory.

        The part's engine allows it, no other part reads the input, and no part writes it, as that output would be lost.
        """
        pairs = ((p, pair) for p in self.parts for pair in p.engine.in_place(p.facts, p.knobs))
        return frozenset(
            pair
            for part, pair in pairs
            if pair[0] not in part.region.subgraph.graph.producer
            if not any(pair[0] in other.region.subgraph.inputs for other in self.parts if other is not part)
        )


def _joined_notes(notes: Sequence[frozenset[NoteT]]) -> frozenset[NoteT]:
    """Notes of a plan whose parts have these notes."""
    missing = {note for note in _OF_ALL if not all(note in of for of in notes)}
    return frozenset(note for of in notes for note in of if note not in missing)


@dataclass(frozen=True)
class Proposal:
    """Plans of one heuristic mode, and the answers of engines. uncovered: nodes that no engine runs. regions: why these
    matches are fused, as text; empty if no pattern matches."""

    mode: heur_mode
    plans: tuple[Plan, ...]
    verdicts: tuple[Verdict, ...]
    uncovered: tuple[str, ...]
    regions: str = ""


def matches(graph: FrozenGraph, registry: Registry) -> tuple[tuple[Region, ...], tuple[Declined, ...]]:
    """Matches of all patterns as regions, and the matches without facts.

    Regions of patterns with `last` come after the others; otherwise those with most nodes come first. Of matches with
    the same nodes and facts, the first pattern's is kept."""
    found = [m for pattern in registry.patterns for m in _found(pattern, graph, registry.origins)]
    distinct = {(m.subgraph.node_ids, m.facts): m for m in reversed(found) if isinstance(m, Region)}
    regions = sorted(reversed(distinct.values()), key=lambda r: (r.last, -len(r.subgraph.node_ids)))
    return tuple(regions), tuple(m for m in found if isinstance(m, Declined))


def _found(pattern: Pattern, graph: FrozenGraph, origins: Mapping[int, Origin]) -> list[Region | Declined]:
    try:
        return guard.matches(pattern, graph)
    except PluginError as error:
        return [Declined(pattern.name, Subgraph(graph, ()), guard.left_out(pattern, error, origins))]


def propose(
    graph: FrozenGraph,
    regions: Sequence[Region],
    engines: Sequence[Engine],
    device: Device,
    mode: heur_mode,
    tunings: Tunings = Tunings(),
    ranking: Sequence[Rank] = RANKING,
    origins: Mapping[int, Origin] = MappingProxyType({}),
    last: Collection[str] = (),
    off: Collection[str] = (),
) -> Proposal:
    """Plans of one mode, best first. origins: of engines that the caller did not pass, by id; if one of these fails, it
    is not used. last: names of engines that are queried only for nodes that no engine of another pattern accepts, in
    every mode. off: names of engines that a setting turns off.

    Engines of their facts run the matched regions that together save most bytes (``cover``). Several patterns may have
    a region of the same nodes, for different engines. All these engines are queried in mode B and if `ranking` has an
    entry of the family. Engines that run any subgraph run the other nodes. If there are none for these, regions are
    chosen again, by their number of nodes first and by bytes second. The engines of a region are ordered by `ranking`,
    else as in `engines`. Tuned knobs of an engine come first. Alternatives differ from the best plan in one region.
    """

    def ask(region: Region, some: Sequence[Engine]) -> list[Part]:
        found: list[Part] = []
        for engine in some:
            asks_last = engine.name in last and facts_for(engine, region) is not None
            other = other_engine(region.subgraph, region.pattern) if asks_last else None
            if other is None:
                found += parts_of(region, engine, device, mode, tunings, origins, verdicts)
            else:
                verdicts.append(Verdict(region, engine.name, No(f"it was not asked, as {other} takes these nodes")))
        return found

    @cache
    def other_engine(nodes: Subgraph, pattern: str) -> str | None:
        """The first engine that accepts these nodes as a region of another pattern; None if there is none."""
        for region in regions:
            for e in engines if region.subgraph == nodes and region.pattern != pattern else ():
                knows = e.name not in last and e.facts is not Subgraph and isinstance(region.facts, e.facts)
                if knows and declined(e, region.facts, nodes, device) is None:
                    return e.name
        return None

    def ranked(region: Region, options: list[Part]) -> list[Part]:
        places = rank(region, device, ranking).places([part.engine.name for part in options])
        return [options[n] for n in sorted(range(len(options)), key=places.__getitem__)]

    @cache
    def fused(nodes: Subgraph) -> list[Part]:
        """Parts that run the nodes of a region together, best first; empty if no engine of its facts accepts them.

        Several patterns may have a region of these nodes, for different engines."""
        found = [r for r in regions if r.subgraph == nodes]
        # Queries take time: a library compiles to find out whether it can run a region. The first pattern's engines are
        # enough, unless the table ranks another engine before them, or mode B requests many plans.
        order, options = rank(found[0], device, ranking), list[Part]()
        for region in found:
            if mode is heur_mode.B or not order.is_first_of({part.engine.name for part in options}):
                options += ask(region, special)
            if not any(isinstance(region.facts, e.facts) for e in engines if e.facts is not Subgraph):
                kind = type(region.facts).__name__
                verdicts.append(Verdict(region, "planning", No(f"it matched, and no engine serves its facts, {kind}")))
        return ranked(found[0], options + ask(found[0], general)) if options else []

    asked = [e for e in engines if mode in e.modes]
    verdicts: list[Verdict] = []
    special = [e for e in asked if e.facts is not Subgraph]
    general = [e for e in asked if e.facts is Subgraph]
    for most_nodes in (False, True):
        sets = [r.subgraph for r in regions]
        chosen = cover.choose(graph, sets, lambda n: bool(fused(sets[n])), most_nodes, sum(r.last for r in regions))
        verdicts += [Verdict(regions[n], "planning", _CIRCLE) for n in chosen.waiting]
        options_of = {sets[n]: fused(sets[n]) for n in chosen.chosen}
        table: list[list[Part]] = []
        uncovered: list[str] = []
        for subgraph in blocks(graph, [*options_of]):
            options = options_of.get(subgraph)
            if options is None:
                rest = Region("", subgraph, subgraph)
                options = ranked(rest, ask(rest, general))
                if not options:
                    uncovered += [str(node) for node in subgraph.nodes]
            table.append(options)
        if not uncovered:
            break
    plans = () if uncovered else tuple(_alternatives(graph, table, device))
    why = _chosen_why(chosen, len(regions), most_nodes)
    silent = {e.name: _NOTHING for e in asked if e.name in last and all(e.name != v.engine for v in verdicts)}
    if device.kind == "cuda":
        everything = Subgraph(graph, tuple(range(len(graph.nodes))))
        unasked = silent | dict.fromkeys(off, _OFF)
        verdicts += [Verdict(Region("", everything, everything), name, why) for name, why in unasked.items()]
    return Proposal(mode, plans, tuple(dict.fromkeys(verdicts)), tuple(uncovered), why)


def _chosen_why(chosen: cover.Cover, matches: int, most_nodes: bool) -> str:
    if not matches:
        return ""
    found = f"{len(chosen.chosen)} of {matches} matches are fused, which saves {chosen.saved} bytes"
    kind = "choice with as many nodes" if most_nodes else "choice"
    if chosen.exact:
        return f"{found}; no other {kind} that engines take saves more"
    return (
        f"{found}; chosen greedily, those that save most first: a better choice was not found in {chosen.steps} steps"
    )


def facts_for(engine: Engine, region: Region) -> object | None:
    """Facts of `region` that `engine` serves: the pattern's, or the subgraph; None if it serves neither."""
    if isinstance(region.facts, engine.facts):
        return region.facts
    return region.subgraph if engine.facts is Subgraph else None


def parts_of(
    region: Region,
    engine: Engine,
    device: Device,
    mode: heur_mode,
    tunings: Tunings,
    origins: Mapping[int, Origin],
    verdicts: list[Verdict],
) -> list[Part]:
    """Parts for the region with each of the engine's knobs, best first. Its answer is appended to `verdicts`."""
    facts = facts_for(engine, region)
    if facts is None:
        return []
    about, parts = region.subgraph, []
    try:
        why = declined(engine, facts, about, device)
        if why is None:
            proposed = guard.call(engine, about, "propose", engine.propose, facts, device, mode)
            ranked = guard.call(engine, about, "problem", tunings.ranked, engine, facts, device, mode, proposed)
            parts = [Part(region, engine, choice.knobs, choice.why) for choice in ranked]
            why = None if parts else No("it proposes no knobs")
            for part in parts:
                guard.try_out(part, device)
    except PluginError as error:
        why, parts = guard.left_out(engine, error, origins), []
    verdicts.append(Verdict(region, engine.name, why))
    return parts


def declined(engine: Engine, facts: object, about: Subgraph, device: Device) -> No | None:
    """The engine's first reason to decline the facts of some nodes; None if it accepts them."""
    undeclared = engine.serves.why_not(about)
    return No(undeclared) if undeclared else guard.call(engine, about, "why_not", engine.why_not, facts, device)


def schedule(graph: FrozenGraph, regions: Sequence[Subgraph]) -> tuple[Subgraph, ...] | None:
    """`regions` and a subgraph for each other node, each after those that it depends on; None if their dependencies
    form a cycle."""
    inside = {i for region in regions for i in region.node_ids}
    blocks = [*regions, *(Subgraph(graph, (i,)) for i in range(len(graph.nodes)) if i not in inside)]
    owner = {i: n for n, block in enumerate(blocks) for i in block.node_ids}
    needs = [{owner[graph.producer[t]] for t in block.inputs if t in graph.producer} for block in blocks]
    sorter = graphlib.TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    ready: list[tuple[int, int]] = []  # a heap by the number of each block's first node
    order: list[Subgraph] = []
    while sorter.is_active():
        for n in sorter.get_ready():
            heapq.heappush(ready, (blocks[n].node_ids[0], n))
        _, n = heapq.heappop(ready)
        order.append(blocks[n])
        sorter.done(n)
    return tuple(order)


def blocks(graph: FrozenGraph, fused: Sequence[Subgraph]) -> Iterator[Subgraph]:
    """`fused` and subgraphs of the other nodes in running order. Consecutive other nodes are one subgraph."""
    run: list[int] = []
    together = set(fused)
    for subgraph in schedule(graph, fused):
        if subgraph not in together:
            run += subgraph.node_ids
            continue
        if run:
            yield Subgraph(graph, tuple(sorted(run)))
            run = []
        yield subgraph
    if run:
        yield Subgraph(graph, tuple(sorted(run)))


def _alternatives(graph: FrozenGraph, table: Sequence[Sequence[Part]], device: Device) -> Iterator[Plan]:
    best = [options[0] for options in table]
    yield assemble(graph, best, device)
    for i, options in enumerate(table):
        for part in options[1:]:
            yield assemble(graph, [*best[:i], part, *best[i + 1 :]], device)


def assemble(
    graph: FrozenGraph, parts: Sequence[Part], device: Device, workspaces: Sequence[int] | None = None
) -> Plan:
    """The plan that runs `parts` in order, checked and with offsets in its workspace.

    workspaces: bytes of each part's scratch memory once it is prepared; None for those of the outlines."""
    subgraphs = [part.region.subgraph for part in parts]
    verify.check_partition(graph, subgraphs)
    sizes = [part.outline.workspace_bytes for part in parts] if workspaces is None else workspaces
    return Plan(tuple(parts), *_layout(graph, subgraphs, sizes), device)


def named(
    graph: FrozenGraph,
    regions: Sequence[Region],
    engines: Sequence[Engine],
    device: Device,
    knobs: Sequence[Callable[[Region], object]],
) -> Plan:
    """The plan that uses exactly `engines` with `knobs`, one pair per part in running order.

    knobs: functions that return the knobs for a region; they may raise GraphNotSupportedError. Raises
    GraphNotSupportedError if the engines cannot run the graph.

    If these engines can run several partitions of the graph, the one that saves most bytes is chosen. Partitions into
    regions that engines of their facts run (as in ``propose``) come first, then those into any regions, which engines
    of any subgraph can run, too.
    """
    unique = list(dict.fromkeys(engines))

    @cache
    def refuses(engine: Engine, region: Region) -> bool:
        facts = facts_for(engine, region)
        return facts is None or declined(engine, facts, region.subgraph, device) is not None

    special = [e for e in unique if e.facts is not Subgraph]
    served = [r for r in regions if not all(refuses(e, r) for e in special)]
    illegal: GraphNotSupportedError | None = None
    for partition in islice(chain(_partitions(graph, served), _partitions(graph, regions)), MOST_PARTITIONS):
        if len(partition) != len(engines) or any(map(refuses, engines, partition)):
            continue
        try:
            chosen = [Part(region, e, k(region)) for region, e, k in zip(partition, engines, knobs, strict=True)]
            for part in chosen:
                _check_knobs(part, device)
        except GraphNotSupportedError as error:
            illegal = illegal or error
            continue
        return assemble(graph, chosen, device)
    if illegal:
        raise illegal
    proposals = [propose(graph, regions, unique, device, mode) for mode in heur_mode]
    reasons = "\n".join(dict.fromkeys(line for p in proposals for line in refusals(p)))
    names = ", ".join(e.name for e in engines)
    raise GraphNotSupportedError(f"engines ({names}) do not cover graph {graph.name!r} in this order:\n{reasons}")


def _partitions(graph: FrozenGraph, regions: Sequence[Region]) -> Iterator[list[Region]]:
    """Partitions of the graph into some of `regions` and other nodes, in running order; those that save most first."""
    for chosen in cover.ranked(graph, [r.subgraph for r in regions]):
        fused = {regions[n].subgraph: regions[n] for n in chosen}
        yield [fused.get(b) or Region("", b, b) for b in blocks(graph, [*fused])]


def _check_knobs(part: Part, device: Device) -> None:
    """Raises GraphNotSupportedError if the part's knobs are illegal."""
    no = guard.call(part.engine, part.region.subgraph, "illegal", part.engine.illegal, part.facts, part.knobs, device)
    if no is not None:
        raise GraphNotSupportedError(f"engine {part.engine.name!r} cannot use {part.knobs}: {no}")
    guard.try_out(part, device)


def unmatched(graph: FrozenGraph, regions: Sequence[Region], declined: Sequence[Declined]) -> tuple[int, ...]:
    """Nodes that are in no match, with or without facts."""
    found = {i for m in (*regions, *declined) for i in m.subgraph.node_ids}
    return tuple(i for i in range(len(graph.nodes)) if i not in found)


def refusals(proposal: Proposal) -> list[str]:
    """Lines with each engine's reason to decline a region, and the nodes that no engine runs."""
    lines = [f"  {v.engine}: {v.why} [{_what(v.region)}]" for v in proposal.verdicts if v.why is not None]
    if proposal.uncovered:
        lines.append(f"  no engine of mode {proposal.mode.name} takes {', '.join(proposal.uncovered)}")
    return lines


def _what(region: Region) -> str:
    nodes = ", ".join(node.name for node in region.subgraph.nodes)
    return f"pattern {region.pattern}: {nodes}" if region.pattern else nodes


def _layout(
    graph: FrozenGraph, parts: Sequence[Subgraph], sizes: Sequence[int]
) -> tuple[dict[TensorId, int], tuple[int, ...], int]:
    """Offsets of tensors between parts, offsets of the parts' scratch memory, and the size of the workspace.

    Blocks that are not in use at the same time share memory (``workspace``). They follow the tensors whose offset is
    fixed. sizes: bytes of the parts' scratch memory."""
    placed = {t.id: t.workspace for t in graph.tensors if t.workspace is not None and t.id in graph.producer}
    floor = max((graph.tensors[t].nbytes + at for t, at in placed.items()), default=0)
    where = {i: n for n, part in enumerate(parts) for i in part.node_ids}
    wanted: list[tuple[workspace.Block, TensorId | None]] = []  # with the tensor; None for a part's scratch memory
    for n, part in enumerate(parts):
        for t in part.outputs:
            if graph.tensors[t].virtual:
                last = max(where[i] for i in graph.consumers[t])
                wanted.append((workspace.Block(n, last, graph.tensors[t].nbytes), t))
        if sizes[n]:
            wanted.append((workspace.Block(n, n, sizes[n]), None))
    offsets, total = workspace.place([block for block, _ in wanted], floor)
    scratch = [0] * len(parts)
    for (block, tensor), at in zip(wanted, offsets, strict=True):
        if tensor is None:
            scratch[block.first] = at
        else:
            placed[tensor] = at
    return placed, tuple(scratch), total
