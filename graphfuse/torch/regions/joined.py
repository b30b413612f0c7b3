"""One program of two tensors of rows that differ in an extent, as of the heads of queries and of keys: one kernel.

Forward joins what is given for each along the axis before the columns, and cuts the results. Gradients are those of the
program, for each of both: a kernel each, in one graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from graphfuse.base.errors import SerializedError, VariantPackError
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.layout import Layout
from graphfuse.functional.tensor_parameter import Rule, Shape, TensorParameter
from graphfuse.op_graph.freeze import infer
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.computation import Computation
from graphfuse.torch.regions.graphs import RegionGraphs, named, read_input
from graphfuse.torch.regions.program import Program, RegionInput, Result


@dataclass(frozen=True)
class JoinedProgram:
    """of: the program. extents: of both along the axis before the columns. shared: names of inputs that both read; all
    others are given for each."""

    of: Program
    extents: tuple[int, int]
    shared: tuple[str, ...]
    follows = False

    @cached_property
    def text(self) -> str:
        """JSON, the same for equal programs."""
        return json.dumps({"joined": [self.extents, self.shared], "of": self.of.text}, separators=(",", ":"))

    @property
    def operations(self) -> str:
        return self.of.operations

    @property
    def outputs(self) -> tuple[Result, ...]:
        return self.of.outputs * 2

    def second(self, name: str) -> str:
        """Name of the second tensor, by that of the first."""
        return name if name in self.shared else f"{name}_1"


@dataclass(frozen=True, eq=False)
class JoinedGraphs(Computation):
    """Computation of a joined program. one: that of the program."""

    program: JoinedProgram
    one: RegionGraphs
    numbers = ()

    @staticmethod
    def of(program: JoinedProgram) -> JoinedGraphs:
        return JoinedGraphs(program, RegionGraphs.of(program.of.text))

    @cached_property
    def tensors(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.tensors)

    @cached_property
    def results(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.results)

    @cached_property
    def statistics(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.statistics)

    @cached_property
    def read_backward(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.read_backward)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.one.kept, *map(self.program.second, self.one.kept))))

    @cached_property
    def gradients(self) -> tuple[TensorParameter | None, ...]:
        pairs = [*zip(self.one.tensors, self.one.gradients, strict=True)]
        first = [None if a.name in self.program.shared else grad for a, grad in pairs]
        return *first, *(grad and self._second(grad) for a, grad in pairs if a.name not in self.program.shared)

    @cached_property
    def incoming(self) -> tuple[str | None, ...]:
        return *self.one.incoming, *(name and self.program.second(name) for name in self.one.incoming)

    @cached_property
    def sources(self) -> Mapping[str, Sequence[str]]:
        found = {out: [n for n in names if n not in self.program.shared] for out, names in self.one.sources.items()}
        second = self.program.second
        return found | {second(out): tuple(map(second, names)) for out, names in found.items()}

    def _both(self, parameters: Iterable[TensorParameter]) -> tuple[TensorParameter, ...]:
        parameters = tuple(parameters)
        return *parameters, *(self._second(a) for a in parameters if a.name not in self.program.shared)

    def _second(self, a: TensorParameter) -> TensorParameter:
        asked = a.asked and self.program.second(a.asked)
        return replace(a, name=self.program.second(a.name), asked=asked, shape=self._rule(a.shape), free=a.shape is None)

    def _rule(self, of: Rule | None) -> Rule:
        first, (expected, other) = self.program.of.inputs[0], self.program.extents

        def rule(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
            *rows, heads, columns = shapes[first.name]
            if heads != expected and len(rows) + 2 == len(first.axes):  # else leading axes may be joined
                raise VariantPackError(f"{first.name} has shape {tuple(shapes[first.name])}; accepted: {expected} for {heads}")
            seen = (*rows, other, columns)
            return of({first.name: seen}) if of else (seen,)

        return rule

    def _forward(self, d: DrawnGraph) -> None:
        statistics = [a.name for a in self.one.statistics if a.name in d]
        given = {one.name: self._read(d, one) for one in self.program.of.inputs}
        made = self.program.of.draw(d.graph, given, training=bool(statistics), apart=True)
        for name in statistics:
            self._store(d, name, named(d.graph, name))
        for one in self.program.of.outputs:
            self._store(d, one.name, made[one.step])

    def _read(self, d: DrawnGraph, one: RegionInput) -> Tensor:
        if one.name in self.program.shared:
            return read_input(d, one)
        names = one.name, self.program.second(one.name)
        heads = (d.for_heads(*each) for each in zip(names, self.program.extents, strict=True))
        made = d.graph.join(*(map(d.__getitem__, names) if one.extents.whole else heads), axis=d.rank - 2)
        infer(d.graph, d.graph.nodes[-1])  # for reductions that read it
        return made

    def _store(self, d: DrawnGraph, name: str, t: Tensor) -> None:
        (first, _), whole = self.program.extents, [slice(None)] * (d.rank - 2)
        for one, part in ((name, slice(first)), (self.program.second(name), slice(first, None))):
            d.store(one, d.graph.slice(t, [*whole, part, slice(None)]))

    def _backward(self, d: DrawnGraph) -> None:
        for name in (str, self.program.second):
            if any(a is not None and name(a.name) in d for a in self.one.gradients):
                self.one.draw_backward(_Renamed(d, name, self.one.backward.arguments))


class _Renamed:
    """A drawing whose arguments have other names."""

    def __init__(self, d: DrawnGraph, name: Callable[[str], str], arguments: Sequence[TensorParameter]):
        self._d, self._name, self.graph = d, name, d.graph
        self.layouts: Mapping[str, Layout] = {a.name: d.layouts[name(a.name)] for a in arguments if name(a.name) in d}

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def like(self, name: str, t: Tensor) -> Tensor:
        return self._d.like(self._name(name), t)

    def store(self, name: str, t: Tensor, of_rows: bool = False) -> None:
        self._d.store(self._name(name), t, of_rows=of_rows)


@lru_cache(maxsize=4096)
def graphs_of(text: str) -> RegionGraphs | JoinedGraphs:
    """Computation of a text, of a program or of one of joined rows. SerializedError for any other."""
    if not text.startswith('{"joined"'):
        return RegionGraphs.of(text)
    try:
        made = json.loads(text)
        (one, other), shared = made["joined"]
        program = JoinedProgram(Program.read(made["of"]), (int(one), int(other)), tuple(shared))
    except (ValueError, TypeError, KeyError) as error:
        raise SerializedError(f"the graph of a region is damaged: {type(error).__name__}: {error}") from None
    return JoinedGraphs.of(program)
