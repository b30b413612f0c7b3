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
from graphfuse.torch.fusion.module import Norm
from graphfuse.torch.operators import epsilon

_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_RUN_ON = frozenset({"cuda", "cpu"})
_MARK = "_graphfuse_fused"

_called_plainly = torch_private.called_plainly()


def set_on(module: torch.nn.Module, function: FunctionType) -> None:
    """Makes `function`, whose first argument is the module, its forward."""
    function.__dict__[_MARK] = True
    module.forward = MethodType(function, module)


def is_set_on(module: torch.nn.Module) -> bool:
    """Whether its forward was set by `set_on`."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, _MARK)


def is_free(module: torch.nn.Module) -> bool:
    """Whether nothing else set its forward: it is its class's own, which pickle and ``kernelize`` may have set as
    such."""
    found = vars(module).get("forward")
    return found is None or isinstance(found, MethodType) and found.__func__ is type(module).forward


def remove_from(module: torch.nn.Module) -> None:
    del module.forward


def forward_of(norm: Norm, cls: type) -> FunctionType:
    """What takes the place of a class's forward for modules that are this norm."""
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


def add_norm_of(norm: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What computes (the norm module of a sum, the sum), by one operator where that is the same."""
    run, parts = of_sum(norm).operator.run, _parts(norm)

    def add_norm(module, residual, x):
        if (
            _called_plainly(module)
            and is_set_on(module)
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


def of_sum(norm: Norm) -> Serving | None:
    """What computes the norm of a residual sum, and the sum."""
    return OPERATORS.get(replace(norm.form, residual=True))


def _parts(norm: Norm) -> Callable[[torch.nn.Module, torch.Tensor], tuple | None]:
    """Returns what gives the operator's arguments behind full tensors: scales and epsilon. None where the operator
    would not compute what the class does."""
    parameters, named, constant = dict(norm.parameters), norm.epsilon, norm.eps
    scales = tuple(parameters.get(n) for n in norm.serving.operator.tensors[1:])
    same_type, autocasts = norm.same_type, norm.autocasts

    def parts(module, x):
        device = x.device.type
        if x.dtype not in _TYPES or device not in _RUN_ON or autocasts and torch.is_autocast_enabled(device):
            return None
        found = tuple(None if n is None else getattr(module, n) for n in scales)
        if any(t is not None and (t.dtype is not x.dtype if same_type else t.dtype not in _TYPES) for t in found):
            return None
        eps = getattr(module, named) if named else constant
        return (*found, epsilon(eps, x))

    return parts
