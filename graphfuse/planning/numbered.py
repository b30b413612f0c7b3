"""Engines by number, as cuDNN's frontend has them: those that take some of a graph, each with one kind of its knobs.

Numbers are of one graph on one device, with the engines that are installed. Names are what plans are kept by.
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
"""Knobs that an engine proposes for a region, best first; none where it does not take it."""


def widest(engine: Engine) -> heur_mode:
    """Mode, of those that ask an engine, in which it proposes most."""
    return next(mode for mode in _WIDEST if mode in engine.modes)


@dataclass(frozen=True)
class knob:  # noqa: N801 - cuDNN's spelling
    """A knob and its range. type: its name. min_value, max_value: of the values that its engine proposes for the graph.
    stride: those lie at multiples of it from the least. Values between are refused where they are not legal."""

    type: str
    min_value: int
    max_value: int
    stride: int


@dataclass(frozen=True)
class NumberedEngine:
    """An engine with one kind of its knobs. proposed: knobs of that kind that it proposes for some of the graph."""

    engine: Engine
    kind: type
    proposed: tuple[object, ...]

    @property
    def knobs(self) -> list[knob]:
        """Knobs that are numbers, with their ranges."""
        values = [knobs_to_dict(one) for one in self.proposed]
        numeric = [f.name for f in dataclasses.fields(self.kind) if all(isinstance(v[f.name], int) for v in values)]
        return [_ranged(name, sorted({int(v[name]) for v in values})) for name in numeric]

    def __str__(self) -> str:
        names = ", ".join(f.name for f in dataclasses.fields(self.kind))
        return f"{self.engine.name} ({names})" if names else self.engine.name


def numbered(
    graph: FrozenGraph, regions: Sequence[Region], engines: Sequence[Engine], proposals: Proposals
) -> tuple[NumberedEngine, ...]:
    """The engines that take one of the regions, or all nodes, in the order in which planning prefers them. Each place
    is an engine's number."""
    everything = Subgraph(graph, tuple(range(len(graph.nodes))))
    found: dict[tuple[int, type], tuple[Engine, list[object]]] = {}
    for engine in engines:
        for region in (*regions, Region("", everything, everything)):
            for knobs in proposals(engine, region):
                found.setdefault((id(engine), type(knobs)), (engine, []))[1].append(knobs)
    return tuple(NumberedEngine(engine, kind, tuple(knobs)) for (_, kind), (engine, knobs) in found.items())


@dataclass(frozen=True)
class Wish:
    """Knobs of which some values are said, by name. kinds: those that they may be of."""

    values: Mapping[str, object]
    kinds: tuple[type, ...]

    def knobs(self, engine: Engine, proposals: Proposals, region: Region) -> object:
        """Knobs for a region: those said in full, else the best proposal that has these values, else the best one with
        them in place of its own. GraphNotSupportedError where the engine proposes none of the kind."""
        names = set(self.values)
        if any(names == {f.name for f in dataclasses.fields(kind)} for kind in self.kinds):
            return knobs_from_dict(engine, dict(self.values))
        proposed = (knobs for knobs in proposals(engine, region) if isinstance(knobs, self.kinds))
        found = [knobs for knobs in proposed if names <= set(knobs_to_dict(knobs))]
        if not found:
            raise GraphNotSupportedError(f"engine {engine.name!r} proposes no knobs with {', '.join(names)} here")
        having = (k for k in found if all(knobs_to_dict(k)[name] == value for name, value in self.values.items()))
        return next(having, None) or dataclasses.replace(found[0], **self.values)


def checked(engine: Engine, kind: type | None, values: Mapping[str, object]) -> Wish:
    """Wish for these values; GraphValidationError for one that no knob of the engine, or of this kind of its knobs,
    has."""
    kinds = (kind,) if kind is not None else engine.knobs if isinstance(engine.knobs, tuple) else (engine.knobs,)
    if not any(set(values) <= {f.name for f in dataclasses.fields(one)} for one in kinds):
        knobs_from_dict(engine, dict(values))  # says what is unknown
        known = "; or: ".join(", ".join(f.name for f in dataclasses.fields(one)) or "none" for one in kinds)
        raise GraphValidationError(f"engine {engine.name!r} has no such knobs: {', '.join(values)}; it has: {known}")
    return Wish(values, kinds)


def _ranged(name: str, values: Sequence[int]) -> knob:
    steps = [later - values[0] for later in values[1:]]
    return knob(name, values[0], values[-1], math.gcd(*steps) or 1)
