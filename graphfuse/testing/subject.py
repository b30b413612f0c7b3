"""The subject of a check: engines, patterns, and the graphs that problems are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphfuse.api import pygraph
from graphfuse.base.errors import GraphTypeError, GraphValidationError
from graphfuse.contract.engine import Engine
from graphfuse.contract.match import Pattern
from graphfuse.op_graph.ir import Subgraph
from graphfuse.planning import registry as plugins
from graphfuse.planning.registry import Registry
from graphfuse.testing.sample_graphs import SampleGraph, sample_of, samples

REFERENCE = "reference"


@dataclass(frozen=True)
class Subject:
    """The subject of a check. name: description. registry: patterns and engines for planning; it has no origins, so
    that errors of a plug-in are raised instead of omitting the plug-in. engines: those that are checked."""

    name: str
    registry: Registry
    engines: tuple[Engine, ...]
    samples: tuple[SampleGraph, ...]


def subject_of(what: object, graphs: Sequence[pygraph]) -> Subject:
    """The subject for a graph; a pattern, an engine, or a tuple of them; or the name of an installed pattern or engine.
    If no graphs are given, they are built from the patterns' templates. Raises GraphTypeError for anything else,
    GraphValidationError for an unknown name."""
    for graph in graphs:
        if not isinstance(graph, pygraph):
            raise GraphTypeError(f"check: graphs are pygraphs, got {graph!r}")
    if isinstance(what, pygraph):
        known = plugins.installed()
        checked = tuple(e for e in known.engines if e.name != REFERENCE)
        return Subject(f"graph {what.name!r}", Registry(known.patterns, known.engines), checked, (sample_of(what),))
    parts = _parts(what)
    passed_patterns = tuple(p for p in parts if isinstance(p, Pattern))
    passed_engines = tuple(e for e in parts if isinstance(e, Engine))
    known = plugins.registry(passed_patterns, passed_engines)
    checked = passed_engines or tuple(e for e in known.engines if e.facts is not Subgraph)
    patterns = passed_patterns or known.patterns
    name = ", ".join(f"{'pattern' if isinstance(p, Pattern) else 'engine'} {p.name!r}" for p in parts)
    bases = tuple(map(sample_of, graphs)) or tuple(sample for pattern in patterns for sample in samples(pattern))
    return Subject(name, Registry(patterns, known.engines), checked, bases)


def _parts(what: object) -> tuple[Pattern | Engine, ...]:
    if isinstance(what, str):
        known = plugins.installed()
        found = tuple(item for item in (*known.patterns, *known.engines) if item.name == what)
        if not found:
            names = ", ".join(dict.fromkeys(item.name for item in (*known.patterns, *known.engines)))
            left = "".join(f"; {line}" for line in plugins.left_out())
            raise GraphValidationError(f"no pattern or engine is named {what!r}; there are: {names}{left}")
        return found
    parts = tuple(what) if isinstance(what, list | tuple) else (what,)
    flat = tuple(p for part in parts for p in (part if isinstance(part, list | tuple) else (part,)))
    if not flat or not all(isinstance(p, Pattern | Engine) for p in flat):
        raise GraphTypeError(
            f"check: accepted: a pygraph, a Pattern, an Engine, a tuple of these two, or the name of an installed one; "
            f"got {what!r}"
        )
    return flat
