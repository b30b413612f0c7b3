"""Graphs of a region's program: inference, training, gradients. Each is for any number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphNotSupportedError, SerializedError, VariantPackError
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.layout import Layout
from graphfuse.functional.problem import planned
from graphfuse.functional.tensor_parameter import FLOATS, INTEGERS, Shape, TensorParameter, types
from graphfuse.gradients.differentiate import differentiate
from graphfuse.gradients.walk import Walk
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.ir import Subgraph, packed_stride
from graphfuse.op_graph.tensor import Tensor
from graphfuse.runtime.fastcall import ALIGNMENT
from graphfuse.torch.operators.by_rule import empty_graph, store
from graphfuse.torch.operators.computation import STATISTICS, Computation, gradient_of
from graphfuse.torch.regions.program import Program, RegionInput, Result, RowExtents

_COLUMNS = 8  # columns, or parts, of the small graph that shows which values gradients read


@dataclass(frozen=True, eq=False)
class RegionGraphs(Computation):
    """Computation of a program, each of whose outputs may have a gradient or not.

    inference: makes outputs from inputs. training: makes what backward keeps in addition, after the outputs. backward:
    makes the requested gradients from what is kept and the gradients of outputs, None for outputs that were not used.
    """

    program: Program

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(text: str) -> RegionGraphs:
        program = Program.read(text)
        if not program.inputs[0].extents.whole:
            raise SerializedError(f"a region reads {program.inputs[0]} first; accepted: what has all rows and columns")
        return RegionGraphs(program)

    @cached_property
    def differentiable(self) -> tuple[RegionInput, ...]:
        """Inputs that have a gradient: an output depends on them, and not through steps with zero gradient alone."""
        return tuple(one for one in self.program.inputs if self.reached[one])

    @cached_property
    def graded(self) -> tuple[Result, ...]:
        """Outputs that have a gradient."""
        return self._reached_by(self.differentiable)

    @cached_property
    def as_given(self) -> Mapping[str, str]:
        found = {}
        for one in self.differentiable:
            out, *others = self.reached[one]
            if not others and one.dtype == out.dtype and one.name in self._is_given(out):
                found[one.name] = f"d{out.name}"
        return found if len(found) < len(self.differentiable) else {}

    @cached_property
    def computed(self) -> tuple[RegionInput, ...]:
        """Inputs whose gradients the backward graph makes."""
        return tuple(one for one in self.differentiable if one.name not in self.as_given)

    @cached_property
    def pulled(self) -> tuple[Result, ...]:
        """Outputs whose gradients the backward graph reads."""
        return self._reached_by(self.computed)

    def _reached_by(self, inputs: Sequence[RegionInput]) -> tuple[Result, ...]:
        found = {out for one in inputs for out in self.reached[one]}
        return tuple(out for out in self.program.outputs if out in found)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Names of what backward reads: inputs, outputs, and tensors of steps with one value a row."""
        graph, given, made = self._small
        for one in self.program.outputs:
            made[one.step].set_name(one.name)
        outputs = [made[one.step] for one in self.pulled]
        found = differentiate(graph, outputs, [given[one.name] for one in self.computed]).kept
        # Inputs whose shapes do not follow from joined rows are read in any case.
        partial = (one.name for one in self.program.inputs if one.extents.has_some_row_axes)
        kept = dict.fromkeys((*map(_identifier, found), *partial))
        has_whole = any(one.extents.whole and one.name in kept for one in (*self.program.inputs, *self.program.outputs))
        if not has_whole and not any(one.extents.whole for one in self.pulled):
            kept[self.program.inputs[0].name] = None  # all shapes follow from its own
        return tuple(kept)

    @cached_property
    def first(self) -> str:
        """Name of the tensor that backward reads first, which has all rows and columns."""
        whole = (one for one in (*self.program.inputs, *self.program.outputs) if one.extents.whole)
        kept = [one.name for one in whole if one.name in self.kept]
        return kept[0] if kept else next(f"d{one.name}" for one in self.pulled if one.extents.whole)

    @cached_property
    def reached(self) -> dict[RegionInput, tuple[Result, ...]]:
        """Outputs that have a gradient with respect to an input, by input."""
        graph, given, made = self._small
        found = {}
        for one in self.program.inputs:
            active = Walk(graph, graph, lambda t: None).active({given[one.name]} if _is_float(one) else ())
            found[one] = tuple(out for out in self.program.outputs if _is_float(out) and made[out.step] in active)
        return found

    @cached_property
    def _small(self) -> tuple[pygraph, dict[str, Tensor], list[Tensor]]:
        rank = len(self.program.inputs[0].axes)
        return self._drawn((*range(2, rank + 1), _COLUMNS * self._longest))

    @property
    def _longest(self) -> int:
        """Columns of the longest parts; 1 without parts."""
        return max(step.part or 1 for step in self.program.steps)

    def why_untrainable(self, rows: Shape, strides: Shape, asked: Sequence[bool], device: str) -> str:
        """Reason why no kernels make the requested gradients; "" if they do, or none is requested. rows, strides: of
        the rows. asked: which of `differentiable` have requested gradients."""
        made = {f"d{one.name}" for one, ask in zip(self.differentiable, asked, strict=True) if ask}
        if made.isdisjoint(f"d{one.name}" for one in self.computed):
            return ""
        try:
            backward = self.backward
        except GraphNotSupportedError as error:
            return str(error)
        layouts = {}
        for a in backward.arguments:
            if not a.written or a.name in made:
                ((dtype, stored),) = list(a.types.items())[:1]
                (shape,) = a.shape({self.first: rows}) if a.shape else (rows,)
                lies = strides if self.program.follows and shape == rows else packed_stride(shape)
                layouts[a.name] = Layout(dtype, stored, shape, lies, torch.device("cpu"), ALIGNMENT)
        _, planner = planned("region_backward", backward, layouts, device)
        regions = [region for region in planner.regions if not region.last]  # inductor fuses the others
        # torch adds the gradients of elements that an index selects to zeros, for which inductor makes more kernels.
        by_number = any(data_type[one.dtype] in INTEGERS.values() for one in self.program.inputs)
        parts = planner.at(0).parts
        if not any(part.engine.facts is Subgraph or part.region.last and not by_number for part in parts):
            return ""
        if not regions:
            return "nothing is reduced for its gradients: inductor makes them element by element"
        declined = (
            engine.why_not(region.facts, planner.device)
            for region in regions
            for engine in planner.registry.engines
            if isinstance(region.facts, engine.facts) and heur_mode.OPENSOURCE in engine.modes
        )
        return f"no kernels make its gradients: {next((no for no in declined if no), _ELEMENTWISE)}"

    # Arguments.

    numbers = ()

    @cached_property
    def tensors(self) -> tuple[TensorParameter, ...]:
        first, *others = self.program.inputs
        return TensorParameter(first.name, _type(first)), *(_parameter(one, first.name) for one in others)

    @cached_property
    def results(self) -> tuple[TensorParameter, ...]:
        first = self.program.inputs[0].name
        made = {one: {"new": _torch(one), "strides": self._strides(one, first)} for one in self.program.outputs}
        return tuple(_parameter(one, first, written=True, **kind) for one, kind in made.items())

    @cached_property
    def statistics(self) -> tuple[TensorParameter, ...]:
        first, names = self.program.inputs[0].name, (name for name in self.kept if name not in self._named)
        rules = ((name, _rule(self._statistic(name), first)) for name in names)
        return tuple(TensorParameter(name, STATISTICS, of, written=True, new=torch.float32) for name, of in rules)

    @cached_property
    def gradients(self) -> tuple[TensorParameter | None, ...]:
        return tuple(self._gradient(one) if one in self.computed else None for one in self.program.inputs)

    @cached_property
    def incoming(self) -> tuple[str | None, ...]:
        return tuple(f"d{one.name}" if one in self.graded else None for one in self.program.outputs)

    @cached_property
    def sources(self) -> Mapping[str, Sequence[str]]:
        return {
            out.name: tuple(one.name for one in self.differentiable if out in self.reached[one])
            for out in self.program.outputs
        }

    @cached_property
    def shared(self) -> Mapping[tuple[str, ...], str]:
        found: dict[tuple[Tensor, str, str], list[str]] = {}
        for one, grad in self._drawn_gradients(self.pulled).items():
            found.setdefault((grad, one.axes, one.dtype), []).append(one.name)
        return {tuple(names): "True" for names in found.values() if len(names) > 1}

    @cached_property
    def passed(self) -> Mapping[str, Sequence[str]]:
        sources = {out.name: self.sources[out.name] for out in self.graded}
        return {out.name: sources[out.name] for out in self.graded if self._is_given(out) == sources[out.name]}

    def _is_given(self, out: Result) -> tuple[str, ...]:
        """Names of inputs whose gradient is unchanged that of an output, if only that output is used."""
        grads = self._drawn_gradients((out,))
        return tuple(one.name for one, t in grads.items() if t.get_name() == f"d{out.name}" and one.axes == out.axes)

    @cached_property
    def read_backward(self) -> tuple[TensorParameter, ...]:
        named = {one.name: (_type(one), one.extents) for one in (*self.program.inputs, *self.program.outputs)}
        read: dict[str, tuple[Mapping, RowExtents, bool]] = {
            name: (*(named.get(name) or (STATISTICS, self._statistic(name))), False) for name in self.kept
        }
        read |= {f"d{one.name}": (_type(one), one.extents, f"d{one.name}" != self.first) for one in self.pulled}
        order = sorted(read, key=lambda name: name != self.first)
        return tuple(
            TensorParameter(name, kind, None if name == self.first else _rule(extents, self.first), optional=optional)
            for name, (kind, extents, optional) in ((name, read[name]) for name in order)
        )

    def _gradient(self, one: RegionInput) -> TensorParameter:
        # If a value serves several rows, each rank that has some of them makes a part of its gradient.
        of_all_rows = set(one.axes[:-1]) <= {"n"}
        return gradient_of(
            one.name,
            types=_type(one),
            new=_torch(one),
            shape=_rule(one.extents, self.first),
            over_rows=None if of_all_rows else "sum",
            strides=self._strides(one, self.first),
        )

    def _strides(self, one: RegionInput | Result, first: str) -> str | None:
        return first if self.program.follows and one.extents.whole else None

    def _statistic(self, name: str) -> RowExtents:
        """Extents of a statistic: one value a row, or a part of a row."""
        graph, rank = self._small[0], len(self.program.inputs[0].axes)
        dim = named(graph, name).get_dim()
        part = _COLUMNS * self._longest // dim[-2] if len(dim) > rank else 0
        return RowExtents("n" * (len(dim) - 1) + "1", part)

    # Graphs.

    def _forward(self, d: GraphBuilder) -> None:
        given = {one.name: read_input(d, one) for one in self.program.inputs}
        # Statistics. This does not read `self.kept`, as inference requires no gradient rules.
        kept = [name for name in d.layouts if name not in self._named]
        made = self.program.draw(d.graph, given, training=bool(kept))
        for name in kept:
            d.store_read(name, named(d.graph, name))
        for one in self.program.outputs:
            d.store(one.name, made[one.step], of_rows=one.extents.without_columns)

    @cached_property
    def _named(self) -> frozenset[str]:
        """Names of inputs and outputs."""
        return frozenset(a.name for a in (*self.tensors, *self.results))

    def _backward(self, d: GraphBuilder) -> None:
        shape = d.layouts[self.first].shape
        forward, given, made = self._drawn(shape)
        names = {t: one.name for one in self.program.inputs for t in (given[one.name],)}
        names |= {made[one.step]: one.name for one in self.program.outputs}
        names |= {named(forward, a.name): a.name for a in self.statistics}

        def kept(t: Tensor) -> Tensor | None:
            return d.like(names[t], t) if names.get(t) in self.kept else None

        walk = Walk(forward, d.graph, kept, rounds=True)
        grads = {made[one.step]: d.like(f"d{one.name}", made[one.step]) for one in self.pulled if f"d{one.name}" in d}
        wanted = {given[one.name]: f"d{one.name}" for one in self.computed if f"d{one.name}" in d}
        found = walk.gradients(grads, [*wanted])
        grads = {n: found[t] if t in found else walk.expanded(0.0, tuple(t.get_dim())) for t, n in wanted.items()}
        store(d, grads, {f"d{one.name}" for one in self.computed if one.extents.without_columns})

    def _drawn_gradients(self, outputs: Sequence[Result]) -> dict[RegionInput, Tensor]:
        """Gradients of inputs if these outputs alone are used, in a separate graph. Inputs that share a gradient have
        the same tensor; it is that of an output's gradient if that is passed on unchanged."""
        forward, given, made = self._small
        graph = empty_graph("region", data_type.FLOAT)
        inputs = {t: graph.tensor_like(t, name) for name, t in given.items()}
        outgoing = {made[one.step]: graph.tensor_like(made[one.step], f"d{one.name}") for one in outputs}
        wanted = [one for one in self.differentiable if not {*outputs}.isdisjoint(self.reached[one])]
        found = Walk(forward, graph, inputs.get).gradients(outgoing, [given[one.name] for one in wanted])
        return {one: found[given[one.name]] for one in wanted if given[one.name] in found}

    def _drawn(self, rows: Shape) -> tuple[pygraph, dict[str, Tensor], list[Tensor]]:
        """Training graph for rows of a shape, whose leading axes may be joined. It is validated."""
        drawn = self.program.graph([one.extents.padded(rows) for one in self.program.inputs], training=True)
        freeze(drawn[0])
        return drawn


_ELEMENTWISE = "a part of them reduces nothing, which inductor computes element by element"


def _is_float(one: RegionInput | Result) -> bool:
    return data_type[one.dtype] in FLOATS.values()


def named(graph: pygraph, name: str) -> Tensor:
    return next(t for t in graph.tensors if _identifier(t.get_name()) == name)


def _identifier(name: str) -> str:
    """Name of a tensor as the name of a parameter."""
    return name.replace("::", "_")


def read_input(d: GraphBuilder, one: RegionInput) -> Tensor:
    return d.of_rows(one.name) if one.extents.without_columns else d[one.name]


def _type(one: RegionInput | Result) -> Mapping[torch.dtype, data_type]:
    return types(data_type[one.dtype])


def _torch(one: RegionInput | Result) -> torch.dtype:
    return next(iter(_type(one)))


def _parameter(one: RegionInput | Result, first: str, **kind: object) -> TensorParameter:
    """A parameter whose shape follows from that of the first."""
    return TensorParameter(one.name, _type(one), _rule(one.extents, first), **kind)


def _rule(extents: RowExtents, first: str):
    def rule(shapes: Mapping[str, Shape]) -> tuple[Shape]:
        rows = shapes[first]
        if extents.rank(rows) > len(extents.axes):
            raise VariantPackError(f"{first} has shape {tuple(rows)}; accepted: {len(extents.axes)} dimensions")
        return (extents.of(rows),)

    return rule
