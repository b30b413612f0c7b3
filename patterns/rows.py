"""Reductions of rows, with the operations on the same rows around them, forward and backward.

These are norms, as one node or many; softmax; cross entropy and its gradient, which reduces nothing; pointwise nodes
before and after; quantization in blocks; and the largest magnitude of a tensor. Any intermediate may be an output.
Quantization in blocks, the rotation of pairs and rows written by number also match without a reduction, with the
pointwise nodes before them. Nodes may say where rows lie: rows gathered by number, several tensors joined, slices.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.engine import No
from graphfuse.ir import Graph
from graphfuse.match import Match, Pattern, PatternGraph, convex
from graphfuse.ops import EXPANSIONS, OPS
from graphfuse.patterns.axes import ENDS, PLACES, Axes
from graphfuse.patterns.builder import Builder
from graphfuse.rows.program import RowProgram


@dataclass(frozen=True)
class RowFacts:
    """Everything an engine may look at.

    node: the name of the node that the match starts from, for messages. row_extents: of the row axes, outermost first,
    neighbours joined where one stride serves both in every tensor; at least one. columns: extent.
    program: what is computed and written, sums over all rows among it.
    """

    node: str
    row_extents: tuple[int, ...]
    columns: int
    program: RowProgram

    @property
    def rows(self) -> int:
        return math.prod(self.row_extents)


_QUANTIZE = "block_scale_quantize"

_ROTATE, _SCATTER = "rotate_pairs", "scatter_rows"
_ALONE = (_QUANTIZE, _ROTATE, _SCATTER)
"""Ops that are taken without a reduction, too."""

_WORK = frozenset({*EXPANSIONS, *ENDS, *PLACES, _ROTATE, "gen_index"})
"""Ops that may work on rows beside the pointwise ones."""


def _template(op_name: str):
    """One node of an op, whatever it is given and makes."""

    def template(g: PatternGraph):
        op = OPS[op_name]
        made = getattr(g, op_name)(**{port.name: g.capture(port.name, port.optional) for port in op.inputs})
        made = made if len(op.outputs) > 1 else [made]
        return {port.name: symbol for port, symbol in zip(op.outputs, made, strict=True)}

    return template


def _reduction(g: PatternGraph):
    return {"output": g.reduction(g.capture("input"))}


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All around the reduction that works on its rows, with the norms that follow; without other norms; without what
    comes before; without what comes after.
    What stands between two norms belongs to the first: what the second reads is in memory anyway. Not so behind a
    product or another op that works on no rows, up to which the first does not come. Around
    quantization what is pointwise: where there is a reduction of its rows, that one's set has both."""
    graph, rows = match.graph, Axes.of(match)
    if rows is None:
        return
    core, center = frozenset(match.subgraph.node_ids), match.anchor
    if center.op_name in _ALONE:
        yield convex(graph, core, lambda i, inside: not rows.reduces(i) and rows.takes(i, inside))
        yield core
        return
    expansion = EXPANSIONS.get(center.op_name)
    beside = expansion.scalars | expansion.of_columns if expansion else ()
    before = graph.above(t for port, t in center.inputs if port not in beside)
    after = graph.below(t for _, t in center.outputs)
    forward = rows.ends and center.op_name in EXPANSIONS
    norms = frozenset(i for i, node in enumerate(graph.nodes) if node.op_name in EXPANSIONS) - core
    first = before & norms if forward else frozenset()
    theirs = first | before & _behind(graph, first)
    for excluded in (theirs, theirs | norms, before | norms, after | theirs | norms):
        yield convex(graph, core, lambda i, inside, out=excluded: i not in out and rows.takes(i, inside))
    yield core


def _behind(graph: Graph, norms: frozenset[int]) -> frozenset[int]:
    """The nodes that need one of `norms` by way of ops that may work on rows."""
    waiting, found = list(norms), set()
    while waiting:
        made = (t for _, t in graph.nodes[waiting.pop()].outputs)
        readers = {i for t in made for i in graph.consumers.get(t, ())} - found
        found |= readers
        waiting += [i for i in readers if graph.nodes[i].op.pointwise or graph.nodes[i].op_name in _WORK]
    return frozenset(found)


def facts(match: Match) -> RowFacts | No:
    """What the match computes, as rows x columns; No if a tensor cannot be seen that way."""
    built = Builder(match).made()
    return built if isinstance(built, No) else RowFacts(match.anchor.name, *built)


PATTERN = Pattern("rows", (*map(_template, (*EXPANSIONS, *_ALONE)), _reduction), facts, grow)
