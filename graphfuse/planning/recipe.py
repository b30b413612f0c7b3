"""A plan as data: the nodes of each part, the engine and its knobs, and the kernels' machine code.

A recipe has names and numbers only. To make a plan of it, patterns match the graph again, and engines check again that
they accept the match and the knobs. Nothing is compiled for that.
"""

import hashlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.base.errors import GraphfuseError, SerializedError
from graphfuse.contract.engine import Engine, knobs_from_dict, knobs_to_dict
from graphfuse.contract.match import Region
from graphfuse.files import json_values
from graphfuse.files.json_values import field, integers, refuse
from graphfuse.op_graph.ir import FrozenGraph, Subgraph
from graphfuse.planning import guard, plan
from graphfuse.planning.plan import Part, Plan


@dataclass(frozen=True)
class PartRecipe:
    """A part of a plan. nodes: their numbers in the lowered graph. pattern: its name, "" if the nodes are no match.
    match: the place among the pattern's matches of these nodes. knobs: values by name."""

    nodes: tuple[int, ...]
    pattern: str
    match: int
    engine: str
    knobs: Mapping[str, object]

    def to_data(self) -> dict[str, object]:
        """Recipe as JSON values. Raises SerializedError for knobs that have no JSON form."""
        where = f"engine {self.engine!r}: knob"
        knobs = {name: json_values.encode(f"{where} {name}", value) for name, value in self.knobs.items()}
        return {**vars(self), "nodes": list(self.nodes), "knobs": knobs}

    @classmethod
    def parse(cls, where: str, data: object) -> "PartRecipe":
        knobs = field(where, data, "knobs", dict)
        return cls(
            integers(where, data, "nodes"),
            field(where, data, "pattern", str),
            field(where, data, "match", int),
            field(where, data, "engine", str),
            {name: json_values.decode(f"{where}: knob {name}", value) for name, value in knobs.items()},
        )


Recipe = tuple[PartRecipe, ...]
"""Parts of a plan in running order."""


ELF = b"\x7fELF"
"""First bytes of a cubin."""


@dataclass(frozen=True)
class Code:
    """A compiled kernel. name: of the source file. entry: name of the kernel's function. source: SHA-256 of the source
    text, in base 16. cubin: machine code; empty on the emulator, which stores its libraries separately."""

    name: str
    entry: str
    source: str
    cubin: bytes

    @classmethod
    def of(cls, source: str, entry: str, name: str, cubin: bytes) -> "Code":
        return cls(name, entry, _digest(source), cubin)


@dataclass(frozen=True)
class Codes:
    """Kernels of a serialized graph. made_by: the version of graphfuse that serialized it."""

    codes: tuple[Code, ...]
    made_by: str

    def find(self, source: str, entry: str, name: str, device: Device) -> Code:
        """The kernel of a source. Raises SerializedError if the serialized graph does not have it."""
        wanted = Code.of(source, entry, name, b"")
        for code in self.codes:
            if (code.name, code.entry, code.source) == (wanted.name, wanted.entry, wanted.source):
                return code
        raise SerializedError(
            f"the serialized graph has no code for kernel {entry!r} of {name} as it is here: graphfuse "
            f"{self.made_by or 'of an unknown version'} generated it from other sources; serialize it anew"
        )


def of(p: Plan, regions: Sequence[Region]) -> Recipe:
    """The recipe of a plan. regions: the matches that the plan was chosen from."""
    return tuple(
        PartRecipe(
            part.region.subgraph.node_ids,
            part.region.pattern,
            _alike(part.region, regions).index(part.region) if part.region.pattern else 0,
            part.engine.name,
            knobs_to_dict(part.knobs),
        )
        for part in p.parts
    )


def rebuild(
    recipe: Recipe, graph: FrozenGraph, regions: Sequence[Region], engines: Sequence[Engine], device: Device
) -> Plan:
    """The plan of a recipe. Raises SerializedError, which names what is missing here for one of its parts."""
    parts = [_part(f"part {n}", one, graph, regions, engines, device) for n, one in enumerate(recipe)]
    return plan.assemble(graph, parts, device)


def _alike(region: Region, regions: Sequence[Region]) -> list[Region]:
    return [r for r in regions if (r.pattern, r.subgraph) == (region.pattern, region.subgraph)]


def _part(
    where: str,
    one: PartRecipe,
    graph: FrozenGraph,
    regions: Sequence[Region],
    engines: Sequence[Engine],
    device: Device,
) -> Part:
    engine = next((e for e in engines if e.name == one.engine), None)
    if engine is None:
        there = ", ".join(e.name for e in engines)
        raise SerializedError(f"{where} is run by engine {one.engine!r}, which is not here; there are: {there}")
    nodes = one.nodes
    if not nodes or list(nodes) != sorted(set(nodes)) or not 0 <= nodes[0] <= nodes[-1] < len(graph.nodes):
        refuse(f"{where}: nodes", list(nodes), f"numbers of nodes in rising order, 0 to {len(graph.nodes) - 1}")
    about = Subgraph(graph, nodes)
    region = Region("", about, about)
    if one.pattern:
        found = _alike(Region(one.pattern, about, about), regions)
        if not 0 <= one.match < len(found):
            names = ", ".join(node.name for node in about.nodes)
            raise SerializedError(f"{where}: pattern {one.pattern!r} does not match {names} here")
        region = found[one.match]
    facts = plan.facts_for(engine, region)
    if facts is None:
        kind, served = type(region.facts).__name__, engine.facts.__name__
        raise SerializedError(f"{where}: engine {one.engine!r} does not serve {kind}; it serves {served}")
    part = Part(region, engine, _knobs(where, engine, one.knobs))
    why = plan.declined(engine, facts, about, device)
    why = why or guard.call(engine, about, "illegal", engine.illegal, facts, part.knobs, device)
    if why:
        raise SerializedError(f"{where}: engine {one.engine!r} cannot run {part.name} on {device}: {why}")
    guard.try_out(part, device)
    return part


def _knobs(where: str, engine: Engine, values: Mapping[str, object]) -> object:
    try:
        knobs = knobs_from_dict(engine, dict(values))
    except GraphfuseError as error:
        raise SerializedError(f"{where}: {error}") from None
    hints = typing.get_type_hints(type(knobs))
    for name, value in knobs_to_dict(knobs).items():
        # Engines check knobs of other types (``Engine.illegal``).
        if hints.get(name) in (bool, int, float, str) and type(value) is not hints[name]:
            refuse(f"{where}: engine {engine.name!r}: knob {name}", value, hints[name].__name__)
    return knobs


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
