"""Operators that autograd knows: three graphs of a ``Norm``, and the autograd formula that joins them.

``graphfuse::NAME`` is what users call. Where no gradient is asked for, its inference graph runs. Where one is,
autograd sees ``NAME_training`` run instead, and ``NAME_backward`` for the gradients.

``torch.library.register_autograd`` would make the same formula with wrappers that take longer than a launch. Torch's
dispatcher takes as long, so calls enter it only where a compiler, tracer, mode or transform listens there. ``forward``
and ``backward`` of the formula are generated for the operator's arguments, and try the fast path of their last call
first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.errors import VariantPackTypeError
from graphfuse.functional.operator import LIBRARY, pass_by_autograd
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED, written
from graphfuse.torch.norm import Norm
from graphfuse.torch.step import Step, defined, made_once, refuse_tangents, refuse_transforms

_observed, _any_requires_grad = torch_private.observed(), torch_private.any_requires_grad()


@dataclass(frozen=True)
class Operator:
    """An operator that autograd knows.

    tensors: names of what it takes before its epsilon. run: the operator, called with (*tensors, eps). inference: the
    function of its inference graph, for calls without gradients that nothing wants to see.
    """

    tensors: tuple[str, ...]
    run: Callable[..., object]
    inference: Callable[..., object]


def differentiable(name: str, norm: Norm) -> Operator:
    """The operator of (*norm.tensors, eps) -> norm.results, and torch's operators ``graphfuse::NAME...``."""
    inference = defined(name, norm.inference, ["eps"])
    training = defined(f"{name}_training", norm.training, ["eps"])
    gradients = defined(f"{name}_backward", norm.backward, [a.asked for a in norm.gradients])
    for step in (training, gradients):
        pass_by_autograd(step.declaration, step.operator)
    apply = _formula(name, norm, training, gradients, alone=False).apply
    apply_alone = torch_private.single_level_apply(_formula(name, norm, training, gradients, alone=True))

    def below_autograd(keyset, *values):
        refuse_tangents(name, values)
        if torch.is_grad_enabled() and _any_requires_grad(*values):
            refuse_transforms(name)
            return apply(*values)
        return torch_private.below_autograd(inference.operator, keyset, *values)

    def call(*values):
        if is_dynamo_compiling() or _observed():  # the compiler asks no closure of ours
            return inference.operator(*values)
        if torch.is_grad_enabled() and _any_requires_grad(*values):
            return apply_alone(*values)
        return inference.function(*values)

    LIBRARY.impl(name, below_autograd, "Autograd", with_keyset=True)
    return Operator(tuple(a.name for a in norm.tensors), call, inference.function)


_TEXT = """
def forward(ctx, {tensors}, eps):
    made = {fast}
    if made is declined:
        made = train(ctx, {tensors}, eps)
    {results}, inverse_rms = made
    {ungraded}
    ctx.save_for_backward({kept}, weight, inverse_rms)
    return {results}


def backward(ctx, dy{dtotal}):
    {kept}, weight, inverse_rms = ctx.saved_tensors
    {needs}, _ = ctx.needs_input_grad
    {unused}
    {shared}
    if grad_enabled():
        made = once({read}, {asked})
    else:
        made = declined if observed() else recent.backward({read}, {asked})
        if made is declined:
            made = differentiate({read}, {asked})
    {gradients} = made
    {given_back}
    return {gradients}, None
"""

# For a residual sum: both terms have the same gradient, which is written once for each data type.
_UNGRADED = """ctx.set_materialize_grads(False)
    if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
        ctx.mark_non_differentiable(total)  # a weight's gradient is not its matter"""
_UNUSED = """if dy is None:  # nobody used the norm
        return dtotal if needs_dx else None, dtotal if needs_dresidual else None, {others}None"""
_SHARED = """is_shared = dy.dtype == total.dtype
    asks_dx, asks_dresidual = (needs_dx or needs_dresidual, False) if is_shared else (needs_dx, needs_dresidual)"""
_GIVEN_BACK = """if is_shared:
        dx, dresidual = dx if needs_dx else None, dx if needs_dresidual else None"""


@dataclass
class _Recent:
    """The fast paths of the last calls of a formula. They decline calls that are not alike."""

    forward: Callable[..., object] = lambda *values: DECLINED
    backward: Callable[..., object] = lambda *values: DECLINED


def _formula(name: str, norm: Norm, training: Step, gradients: Step, alone: bool) -> type[torch.autograd.Function]:
    """What is kept of a forward call, and the gradients that are made from it, in one graph.

    alone: whether forward is only called where nobody else wants to see it.
    """
    recent = _Recent()

    def train(ctx, *values):
        if ctx.needs_input_grad[-1]:
            raise VariantPackTypeError("eps is a tensor that requires a gradient; accepted: a number")
        made = training(*values)
        if not _observed():
            recent.forward = training.function.last() or recent.forward
        return made

    def differentiate(*values):
        values = _in_rows(norm, values)
        made = gradients(*values)
        if not _observed():
            recent.backward = gradients.function.last() or recent.backward
        return made

    once = made_once(name, gradients)
    names = {
        "observed": _observed,
        "declined": DECLINED,
        "recent": recent,
        "train": train,
        "differentiate": differentiate,
        "grad_enabled": torch.is_grad_enabled,
        "once": lambda *values: once(*_in_rows(norm, values)),
    }
    needs = [a.asked for a in norm.gradients]
    asked = [n.replace("needs", "asks") if norm.residual and n in ("needs_dx", "needs_dresidual") else n for n in needs]
    kept = ("total" if norm.residual else "x", *("gate",) * norm.gate)
    text = _TEXT.format(
        tensors=", ".join(tensors := [a.name for a in norm.tensors]),
        fast=f"recent.forward({', '.join(tensors)}, eps)" if alone else "declined",
        results=", ".join(a.name for a in norm.results),
        ungraded=_UNGRADED if norm.residual else "pass",
        kept=", ".join(kept),
        dtotal=", dtotal" * norm.residual,
        needs=", ".join(needs),
        unused=_UNUSED.format(others="None, " * (len(needs) - 2)) if norm.residual else "pass",
        shared=_SHARED if norm.residual else "pass",
        read=", ".join(("dy", *kept, "weight", "inverse_rms", *("dtotal",) * norm.residual)),
        asked=", ".join(asked),
        gradients=", ".join(a.name for a in norm.gradients),
        given_back=_GIVEN_BACK if norm.residual else "pass",
    )
    methods = {step: staticmethod(written(f"{step} of {name}", step, text, names)) for step in ("forward", "backward")}
    # By the class's name torch calls the node of its graph, in errors and profiles.
    return type(name, (torch.autograd.Function,), methods)


def _in_rows(norm: Norm, values: Sequence[object]) -> list[object]:
    """What the backward graph reads, with dy and dtotal contiguous along rows, as kernels want them. The gradient of
    ``sum()`` is not: it is one element, expanded."""
    reads = [a.name for a in norm.backward.arguments if not a.written]
    found = list(values)
    for place, read in enumerate(reads):
        grad = found[place]
        if read in ("dy", "dtotal") and grad is not None and grad.stride(-1) != 1:
            found[place] = grad.contiguous()
    return found
