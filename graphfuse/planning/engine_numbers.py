"""Engines by number, as in cuDNN's frontend: the engines that can run a part of a graph, each with one kind of knobs.

Numbers hold for one graph on one device with the installed engines. Saved plans have the names of engines.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphNotSupportedError, GraphValidationError
from graphfuse.contract.engine import Engine, knobs_from_dict, knobs_to_dict
from graphfuse.contract.match import Region
from graphfuse.op_graph.ir import FrozenGraph, Subgraph

_WIDEST = (heur_mode.B, heur_mode.A, heur_mode.OPENSOURCE, heur_mode.FALLBACK)

Proposals = Callable[[Engine, Region], Sequence[object]]
"""Function that returns the knobs that an engine proposes for a region, best first; empty if it declines the region."""


def widest(engine: Engine) -> heur_mode:
    """The mode in which an engine proposes most knobs, among the modes that use it."""
    return next(mode for mode in _WIDEST if mode in engine.modes)


@dataclass(frozen=True)
class knob:  # noqa: N801 - cuDNN's spelling
    """A knob and the range of the values that its engine proposes for the graph.

    type: its name. stride: proposed values are min_value plus multiples of it. Other values in the range are refused
    only if they are not legal."""

    type: str
    min_value: int
    max_value: int
    stride: int


@dataclass(frozen=True)
class NumberedEngine:
    """An engine with one kind of its knobs. proposed: knobs of this kind that it proposes for regions of the graph."""

    engine: Engine
    kind: type
    proposed: tuple[object, ...]

    @property
    def knobs(self) -> list[knob]:
        """Knobs whose values are numbers, with their ranges."""
        values = [knobs_to_dict(one) for one in self.proposed]
        numeric = [f.name for f in dataclasses.fields(self.kind) if all(isinstance(v[f.name], int) for v in values)]
        return [_ranged(name, sorted({int(v[name]) for v in values})) for name in numeric]

    def __str__(self) -> str:
        names = ", ".join(f.name for f in dataclasses.fields(self.kind))
        return f"{self.engine.name} ({names})" if names else self.engine.name


def numbered(
    graph: FrozenGraph, regions: Sequence[Region], engines: Sequence[Engine], proposals: Proposals
) -> tuple[NumberedEngine, ...]:
    """The engines that can run one of the regions, or all nodes, in the order of `engines`.

    An engine's number is its place."""
    everything = Subgraph(graph, tuple(range(len(graph.nodes))))
    found: dict[tuple[int, type], tuple[Engine, list[object]]] = {}
    for engine in engines:
        for region in (*regions, Region("", everything, everything)):
            for knobs in proposals(engine, region):
                found.setdefault((id(engine), type(knobs)), (engine, []))[1].append(knobs)
    return tuple(NumberedEngine(engine, kind, tuple(knobs)) for (_, kind), (engine, knobs) in found.items())


@dataclass(frozen=True)
class KnobRequest:
    """Values of some or all knobs, by name. kinds: the classes of knobs that have them."""

    values: Mapping[str, object]
    kinds: tuple[type, ...]

    def knobs(self, engine: Engine, proposals: Proposals, region: Region) -> object:
        """Knobs for a region: the values if they are complete, else the best proposal with these values, else the best
        proposal with its values replaced by these.

        Raises GraphNotSupportedError if the engine proposes no knobs of these kinds."""
        names = set(self.values)
        if any(names == {f.name for f in dataclasses.fields(kind)} for kind in self.kinds):
            return knobs_from_dict(engine, dict(self.values))
        proposed = (knobs for knobs in proposals(engine, region) if isinstance(knobs, self.kinds))
        found = [knobs for knobs in proposed if names <= set(knobs_to_dict(knobs))]
        if not found:
            raise GraphNotSupportedError(f"engine {engine.name!r} proposes no knobs with {', '.join(names)} here")
        having = (k for k in found if all(knobs_to_dict(k)[name] == value for name, value in self.values.items()))
        return next(having, None) or dataclasses.replace(found[0], **self.values)


def knob_request(engine: Engine, kind: type | None, values: Mapping[str, object]) -> KnobRequest:
    """Request of these knobs. Raises GraphValidationError for names that the engine, or `kind`, does not have."""
    kinds = (kind,) if kind is not None else engine.knobs if isinstance(engine.knobs, tuple) else (engine.knobs,)
    if not any(set(values) <= {f.name for f in dataclasses.fields(one)} for one in kinds):
        knobs_from_dict(engine, dict(values))  # says what is unknown
        known = "; or: ".join(", ".join(f.name for f in dataclasses.fields(one)) or "none" for one in kinds)
        raise GraphValidationError(f"engine {engine.name!r} has no such knobs: {', '.join(values)}; it has: {known}")
    return KnobRequest(values, kinds)


def _ranged(name: str, values: Sequence[int]) -> knob:
    steps = [later - values[0] for later in values[1:]]
    return knob(name, values[0], values[-1], math.gcd(*steps) or 1)
