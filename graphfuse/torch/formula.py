"""Operators with gradients: three graphs of a ``Computation``, and the autograd formula that joins them.

``graphfuse::NAME`` is what users call. Without gradients, its inference graph runs. With gradients, autograd sees
``NAME_training`` run instead, and ``NAME_backward`` for the gradients.

``torch.library.register_autograd`` would make the same formula with wrappers that take longer than a launch. Torch's
dispatcher takes as long, so calls enter it only if a compiler, tracer, mode or transform listens there. ``forward`` and
``backward`` are generated for the operator's arguments, and try the fast path of their last call first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.errors import VariantPackTypeError
from graphfuse.functional import sharding
from graphfuse.functional.declaration import Columns, Variant
from graphfuse.functional.operator import LIBRARY, pass_by_autograd
from graphfuse.functional.tensor_parameter import TensorParameter
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED, written
from graphfuse.torch.step import Step, defined, made_once, refuse_tangents, refuse_transforms

_observed, _any_requires_grad = torch_private.observed(), torch_private.any_requires_grad()


class Computation(Protocol):
    """What an operator computes.

    tensors, numbers: what it takes. results: what it returns. statistics: what the training phase makes for backward
    beside that. kept: the names of those of all these that backward reads, in its order. gradients: those of `tensors`,
    in their order. inference, training, backward: the graphs; backward reads dy, what is kept and, with a residual sum,
    dtotal. residual: whether the sum of x and residual is returned as total.
    """

    tensors: Sequence[TensorParameter]
    numbers: Sequence[str]
    results: Sequence[TensorParameter]
    statistics: Sequence[TensorParameter]
    kept: Sequence[str]
    gradients: Sequence[TensorParameter]
    inference: Variant
    training: Variant
    backward: Variant
    residual: bool


@dataclass(frozen=True)
class Operator:
    """An operator that autograd knows.

    tensors: names of what it takes before its numbers. run: the operator, called with (*tensors, *numbers). inference,
    training, gradients: the functions of its graphs, for calls that autograd does not see and nothing wants to see.
    """

    tensors: tuple[str, ...]
    run: Callable[..., object]
    inference: Callable[..., object]
    training: Callable[..., object]
    gradients: Callable[..., object]


class ByColumns(Protocol):
    """How the graphs of an operator run where columns are split over ranks."""

    forward: Columns
    backward: Columns


def differentiable(name: str, of: Computation, by_columns: ByColumns | None = None) -> Operator:
    """The operator of (*of.tensors, *of.numbers) -> of.results, and torch's operators ``graphfuse::NAME...``."""
    forward, backward = (None, None) if by_columns is None else (by_columns.forward, by_columns.backward)
    inference = defined(name, of.inference, of.numbers, columns=forward)
    training = defined(f"{name}_training", of.training, of.numbers, columns=forward)
    gradients = defined(f"{name}_backward", of.backward, [a.asked for a in of.gradients], columns=backward)
    for step in (training, gradients):
        pass_by_autograd(step.declaration, step.operator)
    apply = _formula(name, of, training, gradients, alone=False).apply
    apply_alone = torch_private.single_level_apply(_formula(name, of, training, gradients, alone=True))

    def below_autograd(keyset, *values):
        sharding.prepare()
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
    names = tuple(a.name for a in of.tensors)
    return Operator(names, call, inference.function, training.function, gradients.function)


_TEXT = """
def forward(ctx, {arguments}):
    made = {fast}
    if made is declined:
        made = train(ctx, {arguments})
    {made} = made
    {ungraded}
    ctx.save_for_backward({kept})
    return {results}


def backward(ctx, dy{dtotal}):
    {kept}, = ctx.saved_tensors
    {needs}, = ctx.needs_input_grad
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
    return {given}
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


def _formula(name: str, of: Computation, training: Step, gradients: Step, alone: bool) -> type[torch.autograd.Function]:
    """What is kept of a forward call, and the gradients that are made from it, in one graph.

    alone: whether forward is only called where nobody else wants to see it.
    """
    recent = _Recent()

    def train(ctx, *values):
        if of.numbers and ctx.needs_input_grad[-1]:
            raise VariantPackTypeError("eps is a tensor that requires a gradient; accepted: a number")
        made = training(*values)
        if not _observed():
            recent.forward = training.function.last() or recent.forward
        return made

    def differentiate(*values):
        values = _in_rows(of, values)
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
        "once": lambda *values: once(*_in_rows(of, values)),
    }
    needs = [a.asked for a in of.gradients]
    asked = [n.replace("needs", "asks") if of.residual and n in ("needs_dx", "needs_dresidual") else n for n in needs]
    arguments = ", ".join([*(a.name for a in of.tensors), *of.numbers])
    found = [a.name for a in of.gradients]
    text = _TEXT.format(
        arguments=arguments,
        fast=f"recent.forward({arguments})" if alone else "declined",
        made=", ".join(a.name for a in (*of.results, *of.statistics)),
        results=", ".join(a.name for a in of.results),
        ungraded=_UNGRADED if of.residual else "pass",
        kept=", ".join(of.kept),
        dtotal=", dtotal" * of.residual,
        needs=", ".join([*needs, *("_",) * len(of.numbers)]),
        unused=_UNUSED.format(others="None, " * (len(needs) - 2)) if of.residual else "pass",
        shared=_SHARED if of.residual else "pass",
        read=", ".join(("dy", *of.kept, *("dtotal",) * of.residual)),
        asked=", ".join(asked),
        gradients=", ".join(found),
        given_back=_GIVEN_BACK if of.residual else "pass",
        given=", ".join([*found, *("None",) * len(of.numbers)]),
    )
    methods = {step: staticmethod(written(f"{step} of {name}", step, text, names)) for step in ("forward", "backward")}
    # By the class's name torch calls the node of its graph, in errors and profiles.
    return type(name, (torch.autograd.Function,), methods)


def _in_rows(of: Computation, values: Sequence[object]) -> list[object]:
    """What the backward graph reads, with dy and dtotal contiguous along rows, as kernels want them. The gradient of
    ``sum()`` is not: it is one element, expanded."""
    reads = [a.name for a in of.backward.arguments if not a.written]
    found = list(values)
    for place, read in enumerate(reads):
        grad = found[place]
        if read in ("dy", "dtotal") and grad is not None and grad.stride(-1) != 1:
            found[place] = grad.contiguous()
    return found
