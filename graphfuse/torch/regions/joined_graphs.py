"""Programs of two row tensors that differ in an extent, such as queries and keys in number of heads: one kernel for
both.

Forward joins the inputs of both along the axis before the columns, and splits the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from graphfuse.base.errors import VariantPackError
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import Shape
from graphfuse.op_graph.freeze import infer
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.paired_computation import PairedComputation
from graphfuse.torch.regions.graphs import RegionGraphs, named, read_input
from graphfuse.torch.regions.program import Program, RegionInput


@dataclass(frozen=True, eq=False)
class JoinedGraphs(PairedComputation):
    """Computation of a joined program."""

    program: Program
    numbers = ()

    @cached_property
    def each(self) -> tuple[RegionGraphs, RegionGraphs]:
        return RegionGraphs(self.program), RegionGraphs(self.program.marked("_1"))

    @cached_property
    def differentiable(self) -> tuple[RegionInput, ...]:
        return tuple(one for each in self.each for one in each.differentiable if one.name not in self.shared_names)

    def rows(self, shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
        first, (expected, other) = self.program.inputs[0].name, self.program.joined
        *rows, heads, columns = shapes[first]
        if heads != expected:
            raise VariantPackError(f"{first} has shape {tuple(shapes[first])}; accepted: {expected} for {heads}")
        return ((*rows, other, columns),)

    def _forward(self, d: GraphBuilder) -> None:
        first, second = self.each
        pairs = zip(first.program.inputs, second.program.inputs, strict=True)
        given = {one.name: self._read(d, one, other) for one, other in pairs}
        kept = [pair for pair in zip(first.statistics, second.statistics, strict=True) if pair[0].name in d]
        made = first.program.draw(d.graph, given, training=bool(kept), separate_scale=True)
        for one, other in kept:
            self._store(d, named(d.graph, one.name), one.name, other.name)
        for one, other in zip(first.program.outputs, second.program.outputs, strict=True):
            self._store(d, made[one.step], one.name, other.name)

    def _read(self, d: GraphBuilder, one: RegionInput, other: RegionInput) -> Tensor:
        if one == other:
            return read_input(d, one)
        pairs = zip((one.name, other.name), self.program.joined, strict=True)
        made = d.graph.join(*(d[x] if one.extents.whole else d.for_heads(x, n) for x, n in pairs), axis=d.rank - 2)
        infer(d.graph, d.graph.nodes[-1])  # for reductions that read it
        return made

    def _store(self, d: GraphBuilder, t: Tensor, *names: str) -> None:
        cut, whole = self.program.joined[0], [slice(None)] * (d.rank - 2)
        for name, part in zip(names, (slice(cut), slice(cut, None)), strict=True):
            d.store(name, d.graph.slice(t, [*whole, part, slice(None)]))


@lru_cache(maxsize=4096)
def graphs_of(text: str) -> RegionGraphs | JoinedGraphs:
    """Computation of the program that a text describes."""
    program = Program.read(text)
    return JoinedGraphs(program) if program.joined else RegionGraphs.of(text)
