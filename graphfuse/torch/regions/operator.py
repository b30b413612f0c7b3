"""``graphfuse::region(Tensor[] inputs, str graph) -> Tensor[]``, which runs any program, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.functional import sharding
from graphfuse.functional.declaration import Function
from graphfuse.functional.function import entry
from graphfuse.functional.operator import LIBRARY, fake_tensors
from graphfuse.runtime import torch_private
from graphfuse.torch.operators.formula import formula
from graphfuse.torch.operators.step import GraphOperator, called, declared, refuse_tangents, refuse_transforms
from graphfuse.torch.regions.graphs import RegionGraphs

Tensors = Sequence[torch.Tensor | None]

_any_requires_grad = torch_private.any_requires_grad()


@dataclass(frozen=True, eq=False)
class RegionOperator:
    """The operator for one program: its graphs as functions, and what joins them for autograd."""

    graphs: RegionGraphs

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(text: str) -> RegionOperator:
        return RegionOperator(RegionGraphs.of(text))

    @cached_property
    def run(self) -> Callable[..., object]:
        """Function of the inputs, which returns the output, or a tuple of several, with gradients."""
        watched = [a.name for a in self.graphs.differentiated]
        return called("region", self.inference, self._formula(alone=True), watched)

    @cached_property
    def apply(self) -> Callable[..., object]:
        """``run`` where gradients are wanted, and somebody else wants to see what is called."""
        return self._formula(alone=False).apply

    @cached_property
    def inference(self) -> GraphOperator:
        return self._operator(declared("region", self.graphs.inference, ()), region)

    @cached_property
    def training(self) -> GraphOperator:
        return self._operator(declared("region_training", self.graphs.training, ()), region_training)

    @cached_property
    def gradients(self) -> GraphOperator:
        asked = [a.asked for a in self.graphs.gradients if a is not None]
        return self._operator(declared("region_backward", self.graphs.backward, asked), region_backward)

    @cached_property
    def watched(self) -> tuple[int, ...]:
        """Positions of inputs that have a gradient."""
        return tuple(n for n, a in enumerate(self.graphs.gradients) if a is not None)

    def _formula(self, alone: bool) -> type[torch.autograd.Function]:
        return formula("region", self.graphs, self.training, self.gradients, alone)

    def _operator(self, f: Function, operator: Callable[..., list[torch.Tensor]]) -> GraphOperator:
        text, count = self.graphs.program.text, len(f.parameters) - len(f.options)

        def dispatched(*values):
            asked = values[count:]
            made = operator(values[:count], text, asked) if asked else operator(values, text)
            return _returned(made, asked)

        return GraphOperator(f, entry(f, dispatched), dispatched)


def _returned(made: Sequence[torch.Tensor], asked: Sequence[bool]) -> object:
    """Tensors as a function returns them, None for one that was not asked for. asked: for each, or nothing for all."""
    if asked:
        found = iter(made)
        made = [next(found) if ask else None for ask in asked]
    return tuple(made) if len(made) > 1 else made[0]


def _list(made: object) -> list[torch.Tensor]:
    """Tensors that a function returns, without those that were not asked for."""
    return [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]


def _of(inputs: Tensors, graph: str) -> RegionOperator:
    of = RegionOperator.of(graph)
    if len(inputs) != len(of.graphs.tensors):
        raise VariantPackError(f"a region is given {len(inputs)} tensors; accepted: {len(of.graphs.tensors)}")
    return of


_STEPS = {
    "region(Tensor[] inputs, str graph) -> Tensor[]": lambda tensors, graph: _of(tensors, graph).inference,
    "region_training(Tensor[] inputs, str graph) -> Tensor[]": lambda tensors, graph: _of(tensors, graph).training,
    "region_backward(Tensor?[] read, str graph, bool[] asked) -> Tensor[]": (
        lambda tensors, graph: RegionOperator.of(graph).gradients
    ),
}


def _define(schema: str, step: Callable[[Tensors, str], GraphOperator]) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]

    def run(tensors, graph, asked=()):
        return _list(step(tensors, graph).function(*tensors, *asked))

    def fake(tensors, graph, asked=()):
        f = step(tensors, graph).declaration
        given = f.defaults | dict(zip(f.parameters, (*tensors, *asked), strict=True))
        return _list(f.returned(fake_tensors(f, given)))

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphfuse::{name}", fake, lib=LIBRARY)
    if name != "region":
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(torch.ops.graphfuse, name).default


region, region_training, region_backward = (_define(schema, step) for schema, step in _STEPS.items())


def _below_autograd(keyset, inputs: Sequence[torch.Tensor], graph: str) -> list[torch.Tensor]:
    sharding.prepare()
    refuse_tangents("region", inputs)
    if torch.is_grad_enabled() and _any_requires_grad(*inputs):
        of = _of(inputs, graph)
        if any(inputs[n].requires_grad for n in of.watched):
            refuse_transforms("region")
            return _list(of.apply(*inputs))
    return torch_private.below_autograd(region, keyset, inputs, graph)


LIBRARY.impl("region", _below_autograd, "Autograd", with_keyset=True)
