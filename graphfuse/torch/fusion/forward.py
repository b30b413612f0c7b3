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

from graphfuse.runtime import torch_private
from graphfuse.torch.fusion.form import OPERATORS, Serving
from graphfuse.torch.fusion.module import NormModule

_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_RUN_ON = frozenset({"cuda", "cpu"})
_MARK = "_graphfuse_fused"

_called_plainly = torch_private.called_plainly()


def set_on(module: torch.nn.Module, function: FunctionType, norm: NormModule | None = None) -> None:
    """Makes `function`, whose first argument is the module, its forward. norm: what it computes, of a norm."""
    function.__dict__[_MARK] = repr(norm)  # a text, as Dynamo compares it
    module.forward = MethodType(function, module)


def is_set_on(module: torch.nn.Module) -> bool:
    """True if its forward was set by `set_on`."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, _MARK)


def _is_still(module: torch.nn.Module, norm: str) -> bool:
    """True if its forward computes a norm, given as text: nobody put another module in its place."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and getattr(forward.__func__, _MARK, None) == norm


def is_free(module: torch.nn.Module) -> bool:
    """True if nothing else set its forward: it is its class's own, which pickle and ``kernelize`` may have set as
    such."""
    found = vars(module).get("forward")
    return found is None or isinstance(found, MethodType) and found.__func__ is type(module).forward


def remove_from(module: torch.nn.Module) -> None:
    del module.forward


def forward_of(norm: NormModule, cls: type) -> FunctionType:
    """Function in the place of a class's forward for modules that are this norm."""
    own, arguments, run, groups = cls.forward, arguments_of(norm), norm.serving.operator.run, norm.groups
    names = list(inspect.signature(own).parameters)[1:]
    first, gate = names[0], norm.gate
    count = 2 if gate else 1

    def forward(self, *given, **named):
        if len(given) + len(named) == count:
            x = given[0] if given else named.get(first)
            other = None if not gate else named.get(gate) if named else given[1]
            found = arguments(self, x, other)
            if found is not None:
                y = run(*found)
                return y if groups == 1 else y.flatten(-2)
        return type(self).forward(self, *given, **named)

    forward.__wrapped__ = own  # whose arguments inspect.signature tells
    return forward


def arguments_of(norm: NormModule) -> Callable[..., tuple | None]:
    """Returns what gives an operator's arguments for a module, x and a gate, all of them views; None where the operator
    may compute something else than the class's forward."""
    watch, groups, columns, dim, extents = norm.watch, norm.groups, norm.columns, norm.dim, norm.extents
    parameters, named, constant, ranks = dict(norm.parameters), norm.epsilon, norm.eps, norm.ranks
    scales = tuple(parameters.get(n) for n in norm.serving.operator.tensors if n not in ("x", "gate"))
    is_unit, is_gated, same_type, autocasts = norm.form.kind == "unit", bool(norm.gate), norm.same_type, norm.autocasts
    more, is_flat = (norm.factor, dim) if is_unit else (), groups == 1 and len(extents) == 1
    needs_contiguous = norm.is_contiguous

    def arguments(module, x, gate=None):
        if not isinstance(x, torch.Tensor) or is_unit and type(x) is not torch.Tensor or x.ndim not in ranks:
            return None
        if not watch(module):
            return None
        kind, device, shape = x.dtype, x.device, x.shape
        if kind not in _TYPES or device.type not in _RUN_ON or autocasts and torch.is_autocast_enabled(device.type):
            return None
        if columns is not None and shape[dim] != columns or needs_contiguous and not x.is_contiguous():
            return None
        eps = getattr(module, named) if named else constant
        if type(eps) is not float:
            return None
        found = [x]
        if is_gated:
            if not isinstance(gate, torch.Tensor) or gate.dtype is not kind or gate.device != device:
                return None
            if gate.shape != shape or needs_contiguous and not gate.is_contiguous():
                return None
            found.append(gate)
        of_scales = kind if same_type else None
        for name in scales:
            t = None
            if name is not None:
                t = getattr(module, name)
                if not isinstance(t, torch.Tensor) or t.shape != extents or t.device != device:
                    return None
                of_scales = of_scales or t.dtype
                if t.dtype is not of_scales or t.dtype not in _TYPES or needs_contiguous and not t.is_contiguous():
                    return None
            found.append(t)
        if not is_flat:
            full = 1 + is_gated
            found[full:] = [
                t if t is None else t.flatten() if groups == 1 else t.view(groups, -1) for t in found[full:]
            ]
            if groups > 1:
                found[:full] = [t.unflatten(-1, (groups, -1)) for t in found[:full]]
        return (*found, eps, *more)

    return arguments


def add_norm_of(norm: NormModule) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Function that computes (the norm module of a sum, the sum), by one operator where that is the same."""
    run, arguments, same = of_sum(norm).operator.run, arguments_of(norm), repr(norm)

    def add_norm(module, residual, x):
        if _called_plainly(module) and _is_still(module, same) and _are_like(residual, x):
            found = arguments(module, x)
            if found is not None:
                return run(x, residual, *found[1:])
        total = residual + x
        return module(total), total

    return add_norm


def _are_like(residual: object, x: object) -> bool:
    """True if the sum of two is a tensor of the type and shape of each."""
    if not isinstance(x, torch.Tensor) or not isinstance(residual, torch.Tensor):
        return False
    return x.dtype is residual.dtype and x.shape == residual.shape and x.device == residual.device


def norm_add_norm_of(first: NormModule, second: NormModule) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Function that computes (the second norm module of a sum, the sum) of a residual and the first norm module of x:
    by one operator where that is the same."""
    run, same = of_norm_add_norm(first, second).operator.run, (repr(first), repr(second))
    inner, outer, add_norm = arguments_of(first), arguments_of(second), add_norm_of(second)

    def norm_add_norm(module, following, residual, x):
        if (
            _called_plainly(module)
            and _called_plainly(following)
            and _is_still(module, same[0])
            and _is_still(following, same[1])
            and _are_like(residual, x)
        ):
            found, others = inner(module, x), outer(following, x)
            if found is not None and others is not None:
                (_, weight, eps), (_, next_weight, next_eps) = found, others
                return run(x, residual, weight, next_weight, eps, next_eps)
        return add_norm(following, residual, module(x))

    return norm_add_norm


def silu_of(norm: NormModule) -> Callable[..., torch.Tensor]:
    """Function that computes SiLU of a norm module: by one operator where that is the same."""
    run, arguments, same = of_silu(norm).operator.run, arguments_of(norm), repr(norm)

    def norm_silu(module, activation, x):
        if _called_plainly(module) and _is_still(module, same) and (activation is None or _is_silu(activation)):
            found = arguments(module, x, None)
            if found is not None:
                return run(*found)
        y = module(x)
        return torch.nn.functional.silu(y) if activation is None else activation(y)

    return norm_silu


def _is_silu(module: torch.nn.Module) -> bool:
    return module.__class__ is torch.nn.SiLU and "forward" not in vars(module) and _called_plainly(module)


def of_norm_add_norm(first: NormModule, second: NormModule) -> Serving | None:
    """Operator of the norm of a residual sum, of which a term is a norm, and the sum."""
    joins = first.form == second.form and first.groups == second.groups == 1
    return OPERATORS.get(replace(second.form, residual=True, inner=True)) if joins else None


def of_silu(norm: NormModule) -> Serving | None:
    """Operator of SiLU of a norm that is rounded before. Of others the module rounds, and the operator does not."""
    return OPERATORS.get(replace(norm.form, after="SiLU")) if norm.form.kind == "unit" and not norm.form.after else None


def of_sum(norm: NormModule) -> Serving | None:
    """Operator of the norm of a residual sum, and the sum."""
    return OPERATORS.get(replace(norm.form, residual=True)) if norm.groups == 1 else None
