"""Graphs built from a pattern's template, as a user would write them for it to match."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphfuseError
from graphfuse.contract.match import Capture, NodeOutput, NodeTemplate, Pattern, PatternGraph, Symbol, above
from graphfuse.op_graph.ir import FrozenGraph
from graphfuse.op_graph.lower import lower

ROWS, COLUMNS = 4, 64

SHAPES: Mapping[str, tuple[int, int]] = {
    "whole": (ROWS, COLUMNS),
    "a row": (1, COLUMNS),
    "a column": (ROWS, 1),
    "one element": (1, 1),
    "by value": (1, 1),
}
"""Shapes of captures by their names in reports. "By value" is one element that is passed to execute by value."""

_MOST = 64  # graphs per template


@dataclass(frozen=True)
class SampleGraph:
    """A graph before it is varied. name: description for reports. recorded: the graph as recorded by the user."""

    name: str
    graph: FrozenGraph
    recorded: pygraph


def samples(pattern: Pattern) -> Iterator[SampleGraph]:
    """Graphs that the pattern's templates describe, with each sensible choice of shapes, all tensors FLOAT. Each is
    also built without optional captures. A choice that the ops reject is skipped; so is a template without a required
    attribute, whose value only its author knows."""
    templates = pattern.template if isinstance(pattern.template, tuple) else (pattern.template,)
    for template in templates:
        outputs = template(PatternGraph())
        captures = _captures(outputs)
        kept = [c for c in captures if not c.optional]
        for used in [captures] if len(kept) == len(captures) else [captures, kept]:
            for kinds in _choices(len(used)):
                try:
                    graph = _build(outputs, dict(zip(used, kinds, strict=True)))
                except (GraphfuseError, TypeError, ValueError):
                    continue
                name = ", ".join(f"{c.name}: {kind}" for c, kind in zip(used, kinds, strict=True))
                yield SampleGraph(f"{pattern.name} ({name})", lower(graph.frozen), graph)


def sample_of(graph: pygraph) -> SampleGraph:
    """A user's graph, unchanged."""
    graph.validate()
    return SampleGraph(f"graph {graph.name!r}", lower(graph.frozen), graph)


def _choices(count: int) -> Iterator[tuple[str, ...]]:
    """Choices of a shape for each capture, those with most whole tensors first."""
    every = itertools.islice(itertools.product(SHAPES, repeat=count), 4096)
    ranked = sorted(every, key=lambda kinds: sum(kind != "whole" for kind in kinds))
    return iter([kinds for kinds in ranked if "whole" in kinds][:_MOST])


def _captures(outputs: Mapping[str, NodeOutput]) -> Sequence[Capture]:
    nodes = {node for made in outputs.values() for node in above(made.node)}
    found = {symbol for node in nodes for symbol in node.inputs.values() if isinstance(symbol, Capture)}
    return sorted(found, key=lambda c: c.name)


def _build(outputs: Mapping[str, NodeOutput], kinds: Mapping[Capture, str]) -> pygraph:
    graph = pygraph("drawn", io_data_type=data_type.FLOAT, intermediate_data_type=data_type.FLOAT)
    tensors = {
        c: graph.tensor(list(SHAPES[kind]), name=c.name, is_pass_by_value=kind == "by value")
        for c, kind in kinds.items()
    }
    made: dict[NodeTemplate, Mapping[str, object]] = {}

    def of(symbol: Symbol) -> object:
        if isinstance(symbol, Capture):
            return tensors.get(symbol)
        if symbol.node not in made:
            node = symbol.node
            inputs = {port: of(s) for port, s in node.inputs.items()}
            found = getattr(graph, node.op.name)(
                **{p: t for p, t in inputs.items() if t is not None}, **node.attributes
            )
            listed = found if isinstance(found, list | tuple) else [found]
            made[node] = {p.name: t for p, t in zip(node.op.returned, listed, strict=True)}
        return made[symbol.node][symbol.port]

    for name, symbol in outputs.items():
        tensor = of(symbol)
        if tensor is not None:
            tensor.set_name(name).set_output()
    graph.validate()
    return graph
