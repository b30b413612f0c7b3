"""``graphfuse::region(Tensor[] inputs, str graph) -> Tensor[]``, which runs any program, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.functional.operator import LIBRARY, fake_tensors
from graphfuse.runtime import torch_private
from graphfuse.torch.operators.step import made_once, refuse_tangents, refuse_transforms
from graphfuse.torch.regions.graphs import GraphFunction, RegionGraphs

Tensors = Sequence[torch.Tensor | None]


def _list(made: object) -> list[torch.Tensor]:
    """Tensors that a function returns, without those that were not asked for."""
    return [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]


def _fake(function: GraphFunction, values: Sequence[object]) -> list[torch.Tensor]:
    f = function.declaration
    made = f.returned(fake_tensors(f, f.defaults | dict(zip(f.parameters, values, strict=True))))
    return _list(made)


def _of(inputs: Tensors, graph: str) -> RegionGraphs:
    of = RegionGraphs.of(graph)
    if len(inputs) != len(of.program.inputs):
        raise VariantPackError(f"a region is given {len(inputs)} tensors; accepted: {len(of.program.inputs)}")
    return of


def _inference(inputs: Tensors, graph: str) -> list[torch.Tensor]:
    return _list(_of(inputs, graph).inference.call(*inputs))


def _training(inputs: Tensors, graph: str) -> list[torch.Tensor]:
    return _list(_of(inputs, graph).training.call(*inputs))


def _gradients(read: Tensors, graph: str, asked: Sequence[bool]) -> list[torch.Tensor]:
    return _list(RegionGraphs.of(graph).gradients.call(*read, *asked))


_OPERATORS = {
    "region(Tensor[] inputs, str graph) -> Tensor[]": (_inference, lambda t, g: _of(t, g).inference),
    "region_training(Tensor[] inputs, str graph) -> Tensor[]": (_training, lambda t, g: _of(t, g).training),
    "region_backward(Tensor?[] read, str graph, bool[] asked) -> Tensor[]": (
        _gradients,
        lambda t, g: RegionGraphs.of(g).gradients,
    ),
}

for _schema, (_run, _function) in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")

    def _of_fake(tensors, graph, asked=(), function=_function):
        return _fake(function(tensors, graph), (*tensors, *asked))

    torch.library.register_fake(f"graphfuse::{_name}", _of_fake, lib=LIBRARY)
    if _name != "region":
        LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")

region = torch.ops.graphfuse.region.default


def _backward(graph: str, asked: Sequence[bool], *read: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ops.graphfuse.region_backward.default(read, graph, asked))


_once = made_once("region", _backward)


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of = _of(inputs, graph)
        made = torch.ops.graphfuse.region_training.default(inputs, graph)
        outputs = made[: len(of.program.outputs)]
        known = dict(zip((*(one.name for one in of.program.inputs),), inputs, strict=True))
        known |= dict(zip((*(one.name for one in of.program.outputs), *of.statistics), made, strict=True))
        ctx.save_for_backward(*(known[name] for name in of.kept))
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        pairs = zip(of.has_gradient(ctx.needs_input_grad[1:]), outputs, strict=True)
        ctx.mark_non_differentiable(*(t for has_gradient, t in pairs if not has_gradient))
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None):
        of = RegionGraphs.of(ctx.graph)
        known = dict(zip(of.kept, ctx.saved_tensors, strict=True))
        used = {one for one, grad in zip(of.program.outputs, grads, strict=True) if grad is not None}
        for one, grad, (shape, dtype, device) in zip(of.program.outputs, grads, ctx.shapes, strict=True):
            if one not in of.graded:
                continue
            if grad is None and f"d{one.name}" == of.first:
                grad = torch.zeros(shape, dtype=dtype, device=device)
            if grad is not None and grad.dim() and grad.stride(-1) != 1:
                grad = grad.contiguous()
            known[f"d{one.name}"] = grad
        needed = dict(zip((one.name for one in of.program.inputs), ctx.needs_input_grad[1:], strict=True))
        asked = [needed[one.name] and not used.isdisjoint(of.reached[one]) for one in of.differentiable]
        if not any(asked):
            return (None,) * len(ctx.needs_input_grad)
        read = [known[a.name] for a in of.gradients.declaration.arguments if not a.written]
        run = _once if torch.is_grad_enabled() else _backward
        made = iter(run(ctx.graph, asked, *read))
        found = {one.name: next(made) for one, ask in zip(of.differentiable, asked, strict=True) if ask}
        return None, *(found.get(one.name) for one in of.program.inputs)


def _below_autograd(keyset, inputs: Sequence[torch.Tensor], graph: str) -> list[torch.Tensor]:
    refuse_tangents("region", inputs)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs) and _of(inputs, graph).graded:
        refuse_transforms("region")
        return list(_Region.apply(graph, *inputs))
    return torch_private.below_autograd(region, keyset, inputs, graph)


LIBRARY.impl("region", _below_autograd, "Autograd", with_keyset=True)
