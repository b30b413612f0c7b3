"""The backward graph of an operator, made by the gradient rules of the ops in its forward graph.

The forward graph is drawn again, for tensors like those that backward reads, and walked backwards. It is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import MalformedError
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.layout import Layout
from graphfuse.gradients.walk import Walk
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.computation import Computation


def empty_graph(name: str, kind: data_type) -> pygraph:
    """A graph that computes in a type, and rounds tensors that declare another."""
    types = {"intermediate_data_type": kind, "compute_data_type": kind}
    return pygraph(name, **types, intermediate_rounding="declared")


class BackwardByRule:
    """A forward graph and the backward graph that is drawn from it, with their tensors by name.

    d: the backward graph. of: the computation of both. draw: draws the forward graph.
    """

    def __init__(self, d: GraphBuilder, of: Computation, draw: Callable[[GraphBuilder], None]):
        self.d, self.of = d, of
        graph = empty_graph(d.graph.name, d.graph.compute_data_type)
        self.forward = GraphBuilder(graph, self._layouts(), d.options)
        draw(self.forward)
        freeze(graph)
        names = {t: self.forward.pack.get(t.get_name()) for t in graph.tensors}
        made = {t for node in graph.nodes for t in node.outputs.values()}
        self._names = {t: name for t, name in names.items() if name is not None}
        self._kept = {name: self.name(name) for name in of.kept}
        self.given = {t: name for t, name in self._names.items() if t not in made}
        self.made = {name: t for t, name in self._names.items() if t in made}
        self.walk = Walk(graph, d.graph, self.read)

    def name(self, kept: str) -> str:
        """Name that a kept tensor has in backward."""
        return self.of.normalized.name if kept == self.of.kept[0] else kept

    def read(self, t: Tensor) -> Tensor | None:
        """Tensor of backward with the value of a tensor of forward; None if it is computed again."""
        name = self._names.get(t)
        if name in self.of.numbers:
            return self.d.number(name)
        if name in self._kept:
            return self.d.like(self._kept[name], t)
        if t in self.given:
            raise MalformedError(f"{self.d.graph.name}: its gradients need {name}, which is not kept")
        return None

    @cached_property
    def requested(self) -> Mapping[Tensor, str]:
        """Names of the gradients that are requested, by the tensors of forward."""
        return {t: f"d{name}" for t, name in self.given.items() if f"d{name}" in self.d}

    def gradients(self, wanted: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Gradients of tensors of forward, through those results whose gradients backward has."""
        pairs = ((self.made[a.name], grad) for a, grad in zip(self.of.results, self.of.incoming, strict=True))
        given = {made: self.d.like(grad, made) for made, grad in pairs if grad in self.d}
        return self.walk.gradients(given, wanted)

    def _layouts(self) -> dict[str, Layout]:
        """Layouts of what forward reads, and, without gaps, of what it writes. Tensors that backward lacks are laid out
        like those that it has."""
        known, of, layouts, shapes = self.d.layouts, self.of, {}, {}
        base = known[self.name(of.kept[0])]
        for a in (*of.tensors, *of.results, *of.statistics):
            found = known.get(self.name(a.name), known[of.incoming[0]] if a is of.results[0] else None)
            needless = a.optional and f"d{a.name}" not in known
            if found is None and (needless or a in of.statistics):
                continue
            shape = found.shape if found else base.shape if a.shape is None else a.shape(shapes)[0]
            keeps = found and not a.written
            layouts[a.name] = found if keeps else replace(found or base, shape=shape, stride=packed_stride(shape))
            shapes[a.name] = shape
        return layouts


class ByRule(Computation):
    """Computation whose gradients are drawn by the rules of its ops."""

    def _backward(self, d: GraphBuilder) -> None:
        backward = BackwardByRule(d, self, self._forward)
        drawn = {backward.requested[t]: grad for t, grad in backward.gradients([*backward.requested]).items()}
        lacking = [a.name for a in self.gradients if a is not None and a.name in d and a.name not in drawn]
        if lacking:
            raise MalformedError(f"{d.graph.name}: no rule draws {', '.join(lacking)}")
        store(d, drawn)


def store(d: GraphBuilder, gradients: dict[str, Tensor], of_rows: Collection[str] = ()) -> None:
    """Write gradients to arguments. A gradient that other nodes or arguments share is copied first, as writing rounds
    it. of_rows: arguments that have a value a row and no last dimension."""
    read = [t for node in d.graph.nodes for t in node.inputs.values()] + [*gradients.values()]
    for name, grad in gradients.items():
        several = sum(t is grad for t in read) > 1 or not grad.get_is_virtual()
        d.store(name, d.graph.identity(grad) if several else grad, of_rows=name in of_rows)
