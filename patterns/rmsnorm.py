"""RMS normalization with all that stands before and after it on the same rows: pointwise nodes, the largest
magnitude of a row or of all, quantization in blocks. Any value on the way may be an output."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.engine import No
from graphfuse.match import Match, Pattern, PatternGraph, convex
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.builder import Builder
from graphfuse.rows.program import RowProgram


@dataclass(frozen=True)
class RmsNormFacts:
    """Everything an engine may look at.

    node: the normalization's name, for messages. row_extents: of the row axes, outermost first,
    neighbours joined where one stride serves both in every tensor; at least one. columns: extent.
    program: what is computed and written.
    """

    node: str
    row_extents: tuple[int, ...]
    columns: int
    program: RowProgram

    @property
    def rows(self) -> int:
        return math.prod(self.row_extents)


def template(g: PatternGraph):
    y, inverse_rms = norm(g)
    return {"output": y, "inverse_rms": inverse_rms}


def norm(g: PatternGraph):
    """The normalization that every pattern of this family has."""
    return g.rmsnorm(
        input=g.capture("input"),
        scale=g.capture("scale", optional=True),
        epsilon=g.capture("epsilon"),
        bias=g.capture("bias", optional=True),
    )


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All around the normalization that works on its rows; without what comes before; without what comes after.
    What stands between two normalizations belongs to the first: what the second reads is in memory anyway."""
    graph, rows = match.graph, Axes.of(match)
    core = frozenset(match.subgraph.node_ids)
    center = match.node("rmsnorm")
    before = graph.above([center.input("input")])
    after = graph.below(t for _, t in center.outputs)
    others = (graph.nodes[i] for i in before if graph.nodes[i].op_name == center.op_name)
    theirs = before & graph.below(t for node in others for _, t in node.outputs)
    for excluded in (theirs, before, after | theirs):
        yield convex(graph, core, lambda i, inside, out=excluded: i not in out and rows.takes(i, inside))
    yield core


def facts(match: Match) -> RmsNormFacts | No:
    """What the match computes, as rows x columns; No if a tensor cannot be seen that way."""
    built = Builder(match).made()
    if isinstance(built, No):
        return built
    return RmsNormFacts(match.node("rmsnorm").name, built.row_extents, built.columns, built.program)


PATTERN = Pattern("rmsnorm", template, facts, grow)
