"""The backward of an RMS normalization with all that stands before and after it on the same rows: what makes the
incoming gradient, as the backward of an activation of the recomputed normal value, and what reads DX, as the sum with
the gradient of a residual branch. Any value on the way may be an output."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.engine import No
from graphfuse.match import Match, Pattern, PatternGraph, convex
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.builder import Builder
from graphfuse.rows.program import RowProgram


@dataclass(frozen=True)
class RmsNormBackwardFacts:
    """Everything an engine may look at.

    node: the backward node's name, for messages. row_extents: of the row axes, outermost first, neighbours joined where
    one stride serves both in every tensor; at least one. columns: extent. program: what is computed and written, with
    the sums over rows DScale and DBias.
    """

    node: str
    row_extents: tuple[int, ...]
    columns: int
    program: RowProgram

    @property
    def rows(self) -> int:
        return math.prod(self.row_extents)


def template(g: PatternGraph):
    dx, dscale, dbias = g.rmsnorm_backward(
        grad=g.capture("grad"),
        input=g.capture("input"),
        scale=g.capture("scale", optional=True),
        inv_variance=g.capture("inv_variance"),
    )
    return {"dx": dx, "dscale": dscale, "dbias": dbias}


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All around the node that works on its rows; without what comes before; without what comes after; alone."""
    graph, rows = match.graph, Axes.of(match, ends=())
    core = frozenset(match.subgraph.node_ids)
    center = match.node("rmsnorm_backward")
    before = graph.above(t for _, t in center.inputs)
    after = graph.below(t for _, t in center.outputs)
    for excluded in (frozenset(), before, after):
        yield convex(graph, core, lambda i, inside, out=excluded: i not in out and rows.takes(i, inside))
    yield core


def facts(match: Match) -> RmsNormBackwardFacts | No:
    """What the match computes, as rows x columns; No if a tensor cannot be seen that way."""
    built = Builder(match).made()
    if isinstance(built, No):
        return built
    return RmsNormBackwardFacts(match.node("rmsnorm_backward").name, built.row_extents, built.columns, built.program)


PATTERN = Pattern("rmsnorm_backward", template, facts, grow)
