"""Graphs that torch.compile compiles, with operators in place of their sites, and the reports of the last ones."""

import inspect
import itertools
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Group
from torch.fx import GraphModule, Node

from graphfuse.torch.attention import masked as attention
from graphfuse.torch.attention import sinks_in_graphs as sinks
from graphfuse.torch.fusion import cost, losses, rotation, surroundings
from graphfuse.torch.fusion.match import find
from graphfuse.torch.fusion.meaning import value
from graphfuse.torch.fusion.neighbours import own
from graphfuse.torch.fusion.report import Entry, FuseReport
from graphfuse.torch.fusion.rewrite import rewrite
from graphfuse.torch.fusion.site import NormSite
from graphfuse.torch.regions import judged as regions_of
from graphfuse.torch.regions.choose import TorchRegion

_TORCH = str(Path(inspect.getfile(torch)).parent)

KEPT = 64
"""How many graphs ``compile_report`` tells of."""


@dataclass(frozen=True)
class CompileReport:
    """Report on the sites of graphs that were compiled. graphs: the oldest first."""

    graphs: tuple[FuseReport, ...]

    @property
    def replaced(self) -> tuple[Entry, ...]:
        return tuple(e for graph in self.graphs for e in graph.replaced)

    @property
    def left(self) -> tuple[Entry, ...]:
        return tuple(e for graph in self.graphs for e in graph.left)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.graphs)) or "no graph was compiled"

    def __rich__(self) -> Group:
        return Group(*self.graphs) if self.graphs else Group(str(self))


def compile_report() -> CompileReport:
    """Report on what ``torch.compile(backend="graphfuse")`` and ``inductor_pass`` made of the last 64 graphs.

    torch compiles when a function is called, and again for other shapes: each time is a graph of the report, and so is
    each part between graph breaks. With ``inductor_pass``, forward and backward are a graph each.
    ``torch.compiler.reset()`` forgets them with the functions that the backend has compiled.
    """
    return _reports.last()


class _Reports:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[FuseReport] = deque(maxlen=KEPT)
        self._numbers = itertools.count()

    def add(self, title: str, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._kept.append(FuseReport(f"graph {next(self._numbers)}{title}", tuple(entries)))

    def last(self) -> CompileReport:
        with self._lock:
            return CompileReport(tuple(self._kept))

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._numbers = itertools.count()


_reports = _Reports()
tell, forget = _reports.add, _reports.clear


def replace_in(module: GraphModule, declines: bool) -> list[Entry]:
    """Replaces the sites of a graph, and of the graphs that it calls (of checkpoints, branches, loops). declines:
    whether those are left that inductor is as good at."""
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    return [entry for part in parts for entry in _replace_in(part, declines)]


def _replace_in(module: GraphModule, declines: bool) -> list[Entry]:
    attended = sinks.replace(module, _place)
    regions = surroundings.regions(module.graph)
    attended += [Entry(*_place(o.node), o.became, o.why) for o in attention.rewrite(module, regions)]
    attended += [Entry(*_place(n), "" if why else losses.NAME, why) for n, why in losses.replace(module, declines)]
    sites = find(module, once=True)
    rotated, beside = rotation.pairs(module, sites)
    rotated = [pair for pair in rotated if not surroundings.forbids(pair, regions)]
    taken = {r.norm.out: pair for pair in rotated for r in (pair.q, pair.k)}
    judged = _judged([site for site in sites if site.out not in taken], regions)
    if declines:
        judged = [(site, why or surroundings.computes_twice(site)) for site, why in judged]
    kept = frozenset(n for pair in rotated for r in (pair.q, pair.k) for n in (*own(r.norm), r.out))
    whole = [site for site, why in judged if not why]
    rivals = cost.rivals(module.graph, whole) if declines else ()
    kept |= {node for site in whole if site.out not in rivals for node in own(site)}
    chosen, new = regions_of.replace_in(module, declines, kept)
    inside = {node for region, why in chosen if not why for node in region.nodes}
    judged = [(site.reading(new), why) for site, why in judged if site.out not in inside]
    if declines:
        costly = cost.left(module.graph, [site for site, why in judged if not why and site.out not in beside])
        judged = [(site, why or costly.get(site.out, "")) for site, why in judged]
    places = {part.out: _place(part.begun or part.out) for site in sites for part in site.parts}  # before they go
    made = {site.out: site for site in rewrite(module, [site for site, why in judged if not why], rotated)}
    entries = {site.out: list(_entries(site, why, made, beside, places)) for site, why in judged}
    for pair in rotated:
        for one, other in ((pair.q, pair.k), (pair.k, pair.q)):
            note = f"rotated, with {_own(places[other.norm.out])}"
            entries[one.norm.out] = [Entry(*places[one.norm.out], rotation.NAME, note)]
    told = (e for site in sites for part in site.parts for e in entries.get(part.out, ()))
    said = {node for site, _ in judged for part in site.parts for node in own(part)}
    of_regions = (_of_region(region, why) for region, why in chosen if not why or said.isdisjoint(region.nodes))
    return [*told, *of_regions, *attended]


def _of_region(region: TorchRegion, why: str) -> Entry:
    said, place = regions_of.title(region), _place(region.outputs[0])
    return Entry(*place, why=f"{said}: {why}") if why else Entry(*place, "region", said, region.moved)


def _entries(
    site: NormSite,
    why: str,
    made: Mapping[Node, NormSite],
    beside: Mapping[Node, str],
    places: Mapping[Node, tuple[str, str]],
) -> Iterator[Entry]:
    """Entries of a judged site, which was replaced as it is in `made`. beside: why rotations of norms are left."""
    if why:
        yield from (Entry(*places[part.out], why=why) for part in site.parts)
        return
    for part in site.parts:
        whole = made.get(part.out, made[site.out])
        note = "with the residual sum" if whole.total is not None else ""
        if whole.form.unrounded and "gate" in whole.tensors:
            note = "with the gated residual sum"
        if whole.inner is not None:
            first, second = _own(places[whole.inner.out]), _own(places[whole.out])
            note = f"with {second}" if part.out is whole.inner.out else f"with the residual sum and {first}"
        if part.out in beside:
            note = f"the rotation of it is left: {beside[part.out]}"
        yield Entry(*places[part.out], whole.serving.name, note)


def _own(place: tuple[str, str]) -> str:
    """A module's own name, which is the same in all layers."""
    return place[0].rpartition(".")[2]


Verdicts = list[tuple[NormSite, str]]
"""Sites, and why they are left; "" for those that are replaced."""


def _judged(sites: Sequence[NormSite], regions: surroundings.Regions) -> Verdicts:
    """Verdicts by what surrounds the sites."""
    found: Verdicts = []
    for site in _allowed(sites, regions):
        why = surroundings.forbids(site, regions)
        if why and site.total is not None:
            site, why = site.alone, surroundings.forbids(site.alone, regions)
        found.append((site, why))
    return found


def _allowed(sites: Sequence[NormSite], regions: surroundings.Regions) -> Iterator[NormSite]:
    """Sites, those on both sides of a sum in parts where they cannot be one."""
    for site in sites:
        yield from (site.parts if surroundings.forbids(site, regions) else (site,))


def _place(node: Node) -> tuple[str, str]:
    """The name of the module that a node is of, and of its class; in code without modules, those of its function."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if stack:
        path, cls = list(stack.values())[-1]
        # A wrapper of a model's forward has the model as the first of its arguments.
        name = re.sub(r"^L\['args'\]\[0\]\.|^L\['\w+'\]\.?", "", str(path))
        name = re.sub(r"_modules\['(\w+)'\]|\['?(\w+)'?\]", lambda m: f".{m[1] or m[2]}", name).replace("..", ".")
        return name.strip("."), getattr(cls, "__name__", str(cls).rpartition(".")[2])
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    lines = [line for line in lines if not line[0].startswith(_TORCH)]
    if not lines:
        return node.name, "a graph"
    path, line, function = lines[-1]
    return function, f"{Path(path).name}:{line}"


def is_for_training(module: GraphModule) -> bool:
    """True if the graph that Dynamo made has gradients."""
    out = module.graph.output_node().all_input_nodes
    return any(t.requires_grad for node in out if isinstance(t := value(node), torch.Tensor))
