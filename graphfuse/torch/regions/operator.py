"""The operator ``graphfuse::region(Tensor[] inputs, str graph) -> Tensor[]``, which runs any program, and its
gradients."""

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
from graphfuse.torch.operators.graph_operator import GraphOperator, declare, direct_call, within_dispatcher
from graphfuse.torch.regions import vmap
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.joined_graphs import JoinedGraphs, graphs_of

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class RegionOperator:
    """The operator for one program: its graphs as functions, and the autograd formula that joins them."""

    graphs: RegionGraphs | JoinedGraphs

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(text: str) -> RegionOperator:
        return RegionOperator(graphs_of(text))

    @cached_property
    def run(self) -> Callable[..., object]:
        """Function of the inputs that returns the output, or a tuple of several, with gradients."""
        return direct_call("region", self.inference, lambda *inputs: self._unobserved_formula(*inputs), self._watched)

    @cached_property
    def within_dispatcher(self) -> Callable[[Tensors, Callable[[], object]], object]:
        """``run`` for calls that have reached autograd in torch's dispatcher."""
        # Formulas are made when they are called: a program may have no gradient rules if no gradient is requested.
        applied = (lambda *inputs: self._observed_formula(*inputs)), (lambda *inputs: self._unobserved_formula(*inputs))
        return within_dispatcher("region", self.inference, *applied, self._watched)

    @cached_property
    def inference(self) -> GraphOperator:
        return self._operator(declare("region", self.graphs.inference, ()), region)

    @cached_property
    def training(self) -> GraphOperator:
        return self._operator(declare("region_training", self.graphs.training, ()), region_training)

    @cached_property
    def gradients(self) -> GraphOperator:
        asked = [a.asked for a in self.graphs.gradients if a is not None]
        return self._operator(declare("region_backward", self.graphs.backward, asked), region_backward)

    @property
    def _watched(self) -> list[str]:
        return [one.name for one in self.graphs.differentiable]

    @cached_property
    def _observed_formula(self) -> Callable[..., object]:
        return formula("region", self.graphs, self.training, self.gradients, unobserved=False).apply

    @cached_property
    def _unobserved_formula(self) -> Callable[..., object]:
        made = formula("region", self.graphs, self.training, self.gradients, unobserved=True)
        return torch_private.single_level_apply(made)

    def _operator(self, f: Function, operator: Callable[..., list[torch.Tensor]]) -> GraphOperator:
        text, count = self.graphs.program.text, len(f.parameters) - len(f.options)

        def dispatched(*values):
            asked = values[count:]
            # torch does this for lists of tensors, but not if some may be None.
            made = operator([*map(_in_memory, values[:count])], text, asked) if asked else operator(values, text)
            return _returned(made, asked)

        return GraphOperator(f, entry(f, dispatched), dispatched)


def _in_memory(t: torch.Tensor | None) -> torch.Tensor | None:
    """Tensor whose values are those in memory: not lazily conjugated, negated or zero."""
    if t is None:
        return None
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def _returned(made: Sequence[torch.Tensor], asked: Sequence[bool]) -> object:
    """Tensors as a function returns them, None for one that was not requested. asked: for each tensor, or empty for
    all."""
    if asked:
        found = iter(made)
        made = [next(found) if ask else None for ask in asked]
    return tuple(made) if len(made) > 1 else made[0]


def _list(made: object) -> list[torch.Tensor]:
    """Tensors that a function returns, without those that were not requested."""
    if isinstance(made, tuple):
        return [t for t in made if t is not None]
    return [] if made is None else [made]


def without_values(f: Function, values: Sequence[object]) -> list[torch.Tensor]:
    """Tensors without values, as a function returns them for such arguments."""
    return _list(f.returned(fake_tensors(f, f.defaults | dict(zip(f.parameters, values, strict=True)))))


def _of(inputs: Tensors, graph: str) -> RegionOperator:
    of = RegionOperator.of(graph)
    if len(inputs) != len(of.graphs.tensors):
        raise VariantPackError(f"a region is given {len(inputs)} tensors; accepted: {len(of.graphs.tensors)}")
    return of


FROM_INDUCTOR: dict[object, str] = {}
"""By operator, the function that inductor's code calls instead: compiled calls need neither autograd nor the
dispatcher."""


def _define(name: str, schema: str, step: str) -> torch._ops.OpOverload:
    """Defines the operator of one of a program's graphs. step: the name of the graph in ``RegionOperator``."""

    def of(tensors, graph) -> GraphOperator:
        return getattr(RegionOperator.of(graph) if step == "gradients" else _of(tensors, graph), step)

    def run(tensors, graph, asked=()):
        return _list(of(tensors, graph).function(*tensors, *asked))

    def fake(tensors, graph, asked=()):
        return without_values(of(tensors, graph).declaration, (*tensors, *asked))

    def on_ranks(_, operator, types, args, kwargs=None):
        tensors, graph, *asked = args
        one = of(tensors, graph)
        names = one.declaration.parameters
        given = dict(zip(names, (*tensors, *(flag for flags in asked for flag in flags)), strict=True))
        return _list(sharding.on_ranks(one.declaration, given, lambda local: one.operator(*map(local.get, names))))

    def by_inductor(tensors, graph, asked=()):
        # The program was traced with these tensors, so their number is right.
        return _list(getattr(RegionOperator.of(graph), step)(*tensors, *asked))

    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphfuse::{name}", fake, lib=LIBRARY)
    sharding.OTHERS[f"graphfuse::{name}"] = on_ranks
    if name != "region":
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    overload = getattr(torch.ops.graphfuse, name).default
    vmap.register(overload)
    setattr(torch.ops.graphfuse, f"{name}_by_inductor", by_inductor)
    FROM_INDUCTOR[overload] = f"torch.ops.graphfuse.{name}_by_inductor"
    return overload


region = _define("region", "(Tensor[] inputs, str graph) -> Tensor[]", "inference")
region_training = _define("region_training", "(Tensor[] inputs, str graph) -> Tensor[]", "training")
region_backward = _define("region_backward", "(Tensor?[] read, str graph, bool[] asked) -> Tensor[]", "gradients")


def _below_autograd(keyset, inputs: Sequence[torch.Tensor], graph: str) -> list[torch.Tensor]:
    def dispatch():
        return torch_private.below_autograd(region, keyset, inputs, graph)

    made = _of(inputs, graph).within_dispatcher(inputs, dispatch)
    return made if isinstance(made, list) else _list(made)


LIBRARY.impl("region", _below_autograd, "Autograd", with_keyset=True)
