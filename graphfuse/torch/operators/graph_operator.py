"""One graph of a differentiable operator, as a function and as an operator of torch. Also errors for derivatives that
are not supported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.functional import sharding
from graphfuse.functional.declaration import Columns, Function, Variant
from graphfuse.functional.function import define
from graphfuse.functional.operator import pass_by_autograd
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED, text, when, written

_observed, _any_requires_grad = torch_private.needs_dispatcher(), torch_private.any_requires_grad()


@dataclass(frozen=True)
class GraphOperator:
    """One graph of an operator: as a plain function, and as an operator of torch."""

    declaration: Function
    function: Callable[..., Any]
    operator: Callable[..., Any]

    def __call__(self, *values):
        return self.operator(*values) if _observed() else self.function(*values)

    def run_unobserved(self, values: Sequence[object]) -> object:
        """Result of a call within the dispatcher that no mode or transform observes; DECLINED if kernels cannot read
        one of the tensors."""
        last = self.function.last()
        made = DECLINED if last is None else last(*values)
        if made is DECLINED and all(map(torch_private.is_plain, values)):
            return self.function(*values)
        return made


def declare(
    name: str,
    variant: Variant,
    others: Sequence[str],
    chosen_by: tuple[str, ...] = (),
    columns: Columns | None = None,
) -> Function:
    """Function that takes the arguments that a variant reads and then `others`, and returns the arguments that it
    writes. chosen_by: those of `others` that select the graph. columns: how the function runs if columns are split over
    ranks."""
    read = [a for a in variant.arguments if not a.written]
    return Function(
        name,
        parameters=(*(a.name for a in read), *others),
        defaults={a.name: None for a in read if a.optional},
        chosen_by=chosen_by,
        variants=variant,
        results=tuple(a.name for a in variant.arguments if a.written),
        columns=columns,
    )


def define_operator(function: Function, has_formula: bool = False) -> GraphOperator:
    """Defines ``graphfuse::NAME`` for a function. has_formula: whether autograd has a formula for it; otherwise calls
    skip autograd."""
    made = GraphOperator(function, define(function), getattr(torch.ops.graphfuse, function.name).default)
    if not has_formula:
        pass_by_autograd(function, made.operator)
    return made


def once_differentiable(name: str, gradients: Callable[..., object]) -> Callable[..., object]:
    class Once(torch.autograd.Function):
        """Gradients that are recorded in turn (``create_graph=True``). Differentiating them raises an error."""

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


def within_dispatcher(
    name: str,
    inference: GraphOperator,
    apply: Callable[..., object],
    apply_unobserved: Callable[..., object],
    watched: Sequence[str],
) -> Callable[[Sequence[object], Callable[[], object]], object]:
    """Function that runs a call that reached autograd in torch's dispatcher. Its arguments: the call's values, and a
    function that continues the dispatch. apply: the formula for observed calls. All other parameters as in
    ``direct_call``."""
    places = [inference.declaration.parameters.index(name) for name in watched]

    def run(values: Sequence[object], dispatch: Callable[[], object]) -> object:
        sharding.prepare()
        is_observed = _observed()
        if is_observed:
            refuse_tangents(name, values)
        if torch.is_grad_enabled() and _any_requires_grad(*values) and _any_requires_grad(*(values[n] for n in places)):
            if is_observed:
                refuse_transforms(name)
            return apply(*values) if is_observed else apply_unobserved(*values)
        made = DECLINED if is_observed else inference.run_unobserved(values)
        return dispatch() if made is DECLINED else made

    return run


def direct_call(
    name: str, inference: GraphOperator, apply_unobserved: Callable[..., object], watched: Sequence[str]
) -> Callable[..., object]:
    """Function that runs the inference graph, or the autograd formula if there are gradients. apply_unobserved: the
    formula for calls that no mode, tracer or transform observes. watched: the parameters that have gradients.

    torch's dispatcher takes as long as a launch, so calls enter it only if a compiler, tracer, mode or transform
    observes them.
    """
    parameters = inference.declaration.parameters
    given = ", ".join(parameters)
    wanted = [f"grad_enabled() and requires_grad({', '.join(watched)})"] if watched else []
    made = text(
        "call",
        parameters,
        when(["compiling()", "observed()"], f"return operator({given})"),
        when(wanted, f"return apply({given})"),
        f"return function({given})",
    )
    names = {
        "compiling": is_dynamo_compiling,
        "observed": _observed,
        "operator": inference.operator,
        "grad_enabled": torch.is_grad_enabled,
        "requires_grad": _any_requires_grad,
        "apply": apply_unobserved,
        "function": inference.function,
    }
    return written(f"call of {name}", "call", made, names)


def refuse_transforms(name: str) -> None:
    if torch_private.is_differentiated_by_func():
        raise GraphNotSupportedError(
            f"graphfuse::{name} is differentiated by torch.func; accepted: torch.autograd (backward, grad)"
        )


def refuse_tangents(name: str, values: Sequence[object]) -> None:
    if any(isinstance(v, torch.Tensor) and forward_ad.unpack_dual(v).tangent is not None for v in values):
        raise GraphNotSupportedError(
            f"graphfuse::{name} has no forward-mode derivative; accepted: torch.autograd (backward, grad)"
        )
