"""Operators that autograd knows: three graphs of a ``Norm``, and the formula that joins them.

``graphfuse::NAME`` is what users call. Where a gradient is asked for, autograd sees ``NAME_training`` run instead,
and ``NAME_backward`` for the gradients; where none is, the inference graph runs. ``torch.library.register_autograd``
would make the same formula with wrappers that take longer than a launch, and so would torch's dispatcher: it is
entered only where somebody listens there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from graphfuse.errors import GraphNotSupportedError, VariantPackTypeError
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.function import define
from graphfuse.functional.operator import LIBRARY, pass_by_autograd
from graphfuse.runtime import torch_private
from graphfuse.torch.norm import Norm

_tracing, _observed, _any_requires_grad = (
    torch_private.tracing(),
    torch_private.observed(),
    torch_private.any_requires_grad(),
)


def _alone() -> bool:
    """Whether nothing but autograd wants to see what is called: no compiler, tracer, mode, transform or forward
    derivative."""
    return not (is_dynamo_compiling() or _tracing() or _observed())


@dataclass(frozen=True)
class _Step:
    """One graph of an operator: as a function of its own, and as an operator of torch."""

    function: Callable[..., object]
    operator: torch._ops.OpOverload

    def __call__(self, *values):
        return self.function(*values) if _alone() else self.operator(*values)


def _step(name: str, variant: Variant, others: Sequence[str]) -> _Step:
    """Defines ``graphfuse::NAME`` of the arguments that a variant reads and `others`, which returns what it writes."""
    read = [a for a in variant.arguments if not a.written]
    function = Function(
        name,
        parameters=(*(a.name for a in read), *others),
        defaults={a.name: None for a in read if a.optional},
        chosen_by=(),
        variants={(): variant},
        results=tuple(a.name for a in variant.arguments if a.written),
    )
    call = define(function)
    return _Step(call, getattr(torch.ops.graphfuse, name).default)


@dataclass(frozen=True)
class Operator:
    """An operator that autograd knows. tensors: names of what it takes before its epsilon.

    run: of (*tensors, eps). inference: that without gradients, for calls that nobody but the caller wants to see.
    """

    tensors: tuple[str, ...]
    run: Callable[..., object]
    inference: Callable[..., object]


def differentiable(name: str, norm: Norm) -> Operator:
    """The operator of (*norm.tensors, eps) -> norm.results, and torch's operators ``graphfuse::NAME...``."""
    inference = _step(name, norm.inference, ["eps"])
    training = _step(f"{name}_training", norm.training, ["eps"])
    gradients = _step(f"{name}_backward", norm.backward, [a.asked for a in norm.gradients])
    for step in (training, gradients):
        pass_by_autograd(step.operator)
    formula = _formula(name, norm, training, gradients)
    apply, apply_alone = formula.apply, torch_private.single_level_apply(formula)

    def below_autograd(keyset, *values):
        _refuse_tangents(name, values)
        if torch.is_grad_enabled() and _any_requires_grad(*values):
            _refuse_transforms(name)
            return apply(*values)
        return torch_private.below_autograd(inference.operator, keyset, *values)

    def call(*values):
        if not _alone():
            return inference.operator(*values)
        if torch.is_grad_enabled() and _any_requires_grad(*values):
            return apply_alone(*values)
        return inference.function(*values)

    LIBRARY.impl(name, below_autograd, "Autograd", with_keyset=True)
    return Operator(tuple(a.name for a in norm.tensors), call, inference.function)


def _formula(name: str, norm: Norm, training: _Step, gradients: _Step) -> type[torch.autograd.Function]:
    names = [a.name for a in norm.tensors]
    made_once = _made_once(name, gradients)

    class Formula(torch.autograd.Function):
        """What is kept of a forward call, and the gradients that are made from it, in one graph."""

        @staticmethod
        def forward(ctx, *values):
            if ctx.needs_input_grad[-1]:
                raise VariantPackTypeError("eps is a tensor that requires a gradient; accepted: a number")
            y, *total, inverse_rms = training(*values)
            given = dict(zip(names, values, strict=False))
            ctx.set_materialize_grads(False)
            if total and not any(ctx.needs_input_grad[:2]):
                ctx.mark_non_differentiable(*total)  # a weight's gradient is not its matter
            ctx.save_for_backward(*total or (given["x"],), given.get("gate"), given["weight"], inverse_rms)
            return (y, *total) if total else y

        @staticmethod
        def backward(ctx, dy, *others):
            x, gate, weight, inverse_rms = ctx.saved_tensors
            needs = dict(zip(names, ctx.needs_input_grad, strict=False))
            dtotal = others[0] if norm.residual else None
            if dy is None:  # nobody used the norm
                found = {"x": dtotal, "residual": dtotal}
            else:
                # Terms of a sum have one gradient, which is written once for each type.
                shared = norm.residual and dy.dtype == x.dtype
                asked = dict(needs)
                if shared:
                    asked |= {"x": needs["x"] or needs["residual"], "residual": False}
                run = made_once if torch.is_grad_enabled() else gradients
                made = run(
                    _in_rows(dy),
                    x,
                    *(gate,) * norm.gate,
                    weight,
                    inverse_rms,
                    *(_in_rows(dtotal),) * norm.residual,
                    *asked.values(),
                )
                found = dict(zip(names, made, strict=True))
                if shared:
                    found["residual"] = found["x"]
            return (*(found.get(name) if needs[name] else None for name in names), None)

    return type(name, (Formula,), {})  # by whose name torch calls the node of its graph, in errors and profiles


def _in_rows(grad: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient with the elements of each row side by side, as kernels want them: that of a sum is one element."""
    return grad if grad is None or grad.stride(-1) == 1 else grad.contiguous()


def _made_once(name: str, gradients: _Step) -> Callable[..., object]:
    class Once(torch.autograd.Function):
        """The gradients where they are recorded, too: who differentiates them is told that this cannot be."""

        @staticmethod
        def forward(ctx, *values):
            return gradients(*values)

        @staticmethod
        def backward(ctx, *grads):
            raise GraphNotSupportedError(
                f"graphfuse::{name}: its gradient has no derivative; accepted: create_graph=True as long as nothing "
                "is differentiated twice"
            )

    return Once.apply


def _refuse_transforms(name: str) -> None:
    if torch_private.is_differentiated_by_func():
        raise GraphNotSupportedError(
            f"graphfuse::{name} is differentiated by torch.func; accepted: torch.autograd (backward, grad)"
        )


def _refuse_tangents(name: str, values: Sequence[object]) -> None:
    if any(isinstance(v, torch.Tensor) and forward_ad.unpack_dual(v).tangent is not None for v in values):
        raise GraphNotSupportedError(
            f"graphfuse::{name} has no forward-mode derivative; accepted: torch.autograd (backward, grad)"
        )
