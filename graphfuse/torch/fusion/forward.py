"""The forward of a norm that an operator takes the place of.

It is set on the module itself, as ``kernels.kernelize`` does it: class, parameters, hooks and state dict stay what they
are, ``copy.deepcopy`` binds it to the copy, and pickle stores a module without it, which then runs its class's own.
Wherever the operator would compute something else (another type, autocast, more arguments), it calls the class's own.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, MethodType

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.runtime import torch_private
from graphfuse.torch.fusion.form import OPERATORS, Serving
from graphfuse.torch.fusion.module import Norm
from graphfuse.torch.operators import epsilon

_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_RUN_ON = frozenset({"cuda", "cpu"})
_MARK = "_graphfuse_fused"

_called_plainly, _differentiates_forward = torch_private.called_plainly(), torch_private.differentiates_forward()


def set_on(module: torch.nn.Module, function: FunctionType, norm: Norm | None = None) -> None:
    """Makes `function`, whose first argument is the module, its forward. norm: what it computes, of a norm."""
    function.__dict__[_MARK] = repr(norm)  # a text, as Dynamo compares it
    module.forward = MethodType(function, module)


def is_set_on(module: torch.nn.Module) -> bool:
    """Whether its forward was set by `set_on`."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, _MARK)


def _is_still(module: torch.nn.Module, norm: str) -> bool:
    """Whether its forward computes a norm, given as text: nobody put another module in its place."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and getattr(forward.__func__, _MARK, None) == norm


def is_free(module: torch.nn.Module) -> bool:
    """Whether nothing else set its forward: it is its class's own, which pickle and ``kernelize`` may have set as
    such."""
    found = vars(module).get("forward")
    return found is None or isinstance(found, MethodType) and found.__func__ is type(module).forward


def remove_from(module: torch.nn.Module) -> None:
    del module.forward


def forward_of(norm: Norm, cls: type) -> FunctionType:
    """What takes the place of a class's forward for modules that are this norm."""
    if norm.gate or norm.groups > 1 or norm.form.kind == "unit":
        return _shaped_forward_of(norm, cls)
    own, run, parts = cls.forward, norm.serving.operator.run, _parts(norm)
    first = list(inspect.signature(own).parameters)[1]

    def forward(self, *given, **named):
        x = given[0] if len(given) == 1 and not named else named.get(first) if not given and len(named) == 1 else None
        if isinstance(x, torch.Tensor):
            found = parts(self, x)
            if found is not None:
                return run(x, *found)
        return own(self, *given, **named)

    forward.__wrapped__ = own  # whose arguments inspect.signature tells
    return forward


def _shaped_forward_of(norm: Norm, cls: type) -> FunctionType:
    """Of a norm with a gate, of groups or along channels."""
    own, serving, arguments = cls.forward, norm.serving, _arguments(norm)
    run, names, groups = serving.operator.run, list(inspect.signature(own).parameters)[1:], norm.groups
    accepted = {names[0], *([norm.gate] if norm.gate else ())}

    def forward(self, *given, **named):
        tensors = dict(zip(names, given, strict=False)) | named
        if len(given) + len(named) == len(accepted) and tensors.keys() == accepted:
            found = arguments(self, tensors[names[0]], tensors.get(norm.gate))
            if found is not None:
                y = run(*found)
                return y if groups == 1 else y.flatten(-2)
        return own(self, *given, **named)

    forward.__wrapped__ = own
    return forward


def _arguments(norm: Norm) -> Callable[..., tuple | None]:
    """Returns what gives an operator's arguments for a module, x and a gate, all of them views; None where the operator
    would not compute what the class does."""
    serving, groups, parts = norm.serving, norm.groups, _parts(norm)
    more = (norm.factor, norm.dim) if norm.form.kind == "unit" else ()

    def arguments(module, x, gate):
        full = (x, gate) if norm.gate else (x,)
        if not all(isinstance(t, torch.Tensor) and t.shape == x.shape and t.dtype in _TYPES for t in full):
            return None
        if norm.form.kind == "unit" and type(x) is not torch.Tensor:
            return None
        found = parts(module, x)
        if found is None:
            return None
        *scales, eps = found
        if not serving.has_gradients and _needs_gradient(*full, *scales):
            return None
        if groups > 1:
            full = tuple(t.unflatten(-1, (groups, -1)) for t in full)
        scales = (None if t is None else t.flatten() if groups == 1 else t.view(groups, -1) for t in scales)
        return (*full, *scales, eps, *more)

    return arguments


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd, a forward derivative or torch.func would go through an operator of these."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return not is_dynamo_compiling() and (_differentiates_forward() or torch_private.is_differentiated_by_func())


def add_norm_of(norm: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What computes (the norm module of a sum, the sum), by one operator where that is the same."""
    run, parts, same = of_sum(norm).operator.run, _parts(norm), repr(norm)

    def add_norm(module, residual, x):
        if (
            _called_plainly(module)
            and _is_still(module, same)
            and isinstance(x, torch.Tensor)
            and isinstance(residual, torch.Tensor)
            and x.dtype is residual.dtype
            and x.shape == residual.shape
        ):
            found = parts(module, x)
            if found is not None:
                return run(x, residual, *found)
        total = residual + x
        return module(total), total

    return add_norm


def norm_add_norm_of(first: Norm, second: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What computes (the second norm module of a sum, the sum) of a residual and the first norm module of x: by one
    operator in inference, where that is the same."""
    run, ends, same = (
        of_sandwich(first, second).operator.run,
        (_parts(first), _parts(second)),
        (repr(first), repr(second)),
    )
    add_norm = add_norm_of(second)

    def norm_add_norm(module, following, residual, x):
        if (
            _called_plainly(module)
            and _called_plainly(following)
            and _is_still(module, same[0])
            and _is_still(following, same[1])
            and isinstance(x, torch.Tensor)
            and isinstance(residual, torch.Tensor)
            and x.dtype is residual.dtype
            and x.shape == residual.shape
        ):
            found = ends[0](module, x), ends[1](following, x)
            if None not in found:
                (weight, eps), (next_weight, next_eps) = found
                if not _needs_gradient(x, residual, weight, next_weight):
                    return run(x, residual, weight, next_weight, eps, next_eps)
        return add_norm(following, residual, module(x))

    return norm_add_norm


def silu_of(norm: Norm) -> Callable[..., torch.Tensor]:
    """What computes SiLU of a norm module: by one operator where that is the same."""
    run, arguments, same = of_silu(norm).operator.run, _arguments(norm), repr(norm)

    def norm_silu(module, activation, x):
        if _called_plainly(module) and _is_still(module, same) and (activation is None or _called_plainly(activation)):
            found = arguments(module, x, None)
            if found is not None:
                return run(*found)
        y = module(x)
        return torch.nn.functional.silu(y) if activation is None else activation(y)

    return norm_silu


def of_sandwich(first: Norm, second: Norm) -> Serving | None:
    """What computes the norm of a residual sum, of which a term is a norm, and the sum."""
    joins = first.form == second.form and first.groups == second.groups == 1
    return OPERATORS.get(replace(second.form, residual=True, inner=True)) if joins else None


def of_silu(norm: Norm) -> Serving | None:
    """What computes SiLU of a norm that is rounded before. Of others the module rounds, and the operator does not."""
    return OPERATORS.get(replace(norm.form, after="SiLU")) if norm.form.kind == "unit" and not norm.form.after else None


def of_sum(norm: Norm) -> Serving | None:
    """What computes the norm of a residual sum, and the sum."""
    return OPERATORS.get(replace(norm.form, residual=True)) if norm.groups == 1 else None


def _parts(norm: Norm) -> Callable[[torch.nn.Module, torch.Tensor], tuple | None]:
    """Returns what gives the operator's arguments behind full tensors: scales and epsilon. None where the operator
    would not compute what the class does."""
    parameters, named, constant = dict(norm.parameters), norm.epsilon, norm.eps
    scales = tuple(parameters.get(n) for n in norm.serving.operator.tensors if n not in ("x", "gate"))
    same_type, autocasts, constants, rank = norm.same_type, norm.autocasts, norm.constants, norm.rank

    def parts(module, x):
        if constants and any(getattr(module, name, None) != value for name, value in constants):
            return None
        device = x.device.type
        if rank is not None and rank != x.dim():
            return None
        if x.dtype not in _TYPES or device not in _RUN_ON or autocasts and torch.is_autocast_enabled(device):
            return None
        found = tuple(None if n is None else getattr(module, n) for n in scales)
        if any(t is not None and (t.dtype is not x.dtype if same_type else t.dtype not in _TYPES) for t in found):
            return None
        eps = getattr(module, named) if named else constant
        return (*found, epsilon(eps, x))

    return parts
