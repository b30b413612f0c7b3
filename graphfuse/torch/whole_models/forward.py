"""The forward of a module that a kernel takes the place of, and functions for calls that one does.

A forward is set on the module itself, as ``kernels.kernelize`` does it: class, parameters, hooks and state dict stay
what they are, ``copy.deepcopy`` binds it to the copy, and pickle stores a module without it, which then runs its
class's own. Wherever a kernel would compute something else (autocast, more arguments), it calls the class's own.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType

import torch

from graphfuse.runtime import torch_private
from graphfuse.torch.fusion.report import Refused
from graphfuse.torch.fusion.traced import CallOperand, CallSequence, TracedCall, required
from graphfuse.torch.modules.norms import LayerNorm, RMSNorm
from graphfuse.torch.whole_models.fused_calls import FusedCalls, fused

_MARK = "_graphfuse_fused"

_called_plainly = torch_private.called_plainly()


def set_on(module: torch.nn.Module, function: FunctionType) -> None:
    """Makes `function`, whose first argument is the module, its forward."""
    function.__dict__[_MARK] = True
    module.forward = MethodType(function, module)


def is_set_on(module: torch.nn.Module) -> bool:
    """True if its forward was set by `set_on`."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, _MARK)


def is_free(module: torch.nn.Module) -> bool:
    """True if nothing else set its forward: it is its class's own, which pickle and ``kernelize`` may have set as
    such."""
    found = vars(module).get("forward")
    return found is None or isinstance(found, MethodType) and found.__func__ is type(module).forward


def remove_from(module: torch.nn.Module) -> None:
    del module.forward


def recognized(module: torch.nn.Module) -> FusedCalls | Refused | None:
    """Calls of a module's forward. None of one that does not look as if a kernel could take its place: it has children,
    or no kernel does and its class is not called a norm."""
    if isinstance(module, RMSNorm | LayerNorm):
        return Refused("it is graphfuse's")
    if next(module.children(), None) is not None or not _may_be(type(module)):
        return None
    found = _fused(module)
    return found if isinstance(found, FusedCalls) or "norm" in type(module).__name__.lower() else None


def _fused(module: torch.nn.Module) -> FusedCalls | Refused:
    try:
        names = required(module)
    except (TypeError, ValueError):  # of a forward without a signature
        names = []
    if not names:
        return Refused("its forward is given nothing")
    given = {name: CallOperand(n) for n, name in enumerate(names)}
    return fused(CallSequence(len(names), (TracedCall(0, (), given),), (len(names),)), (module,))


def _may_be(cls: type) -> bool:
    """torch's own modules are what their names say."""
    return not cls.__module__.startswith("torch.") or cls in (torch.nn.RMSNorm, torch.nn.LayerNorm)


def forward_of(of: FusedCalls, cls: type) -> FunctionType:
    """Function in the place of a class's forward, of which these are the calls."""
    own, result = cls.forward, of.result
    names = [*of.calls.calls[0].named]
    count, signature = len(names), [*inspect.signature(own).parameters][1:]
    in_order = next((n for n, name in enumerate(names) if signature[n] != name), count)

    def forward(self, *given, **named):
        if len(given) + len(named) == count and len(given) <= in_order:
            full = (*given, *[named.get(name) for name in names[len(given) :]]) if named else given
            y = result(self, *full)
            if y is not None:
                return y
        return type(self).forward(self, *given, **named)

    forward.__wrapped__ = own  # whose arguments inspect.signature tells
    return forward


def together(of: FusedCalls) -> Callable[..., object]:
    """Function of modules, and then of what their calls are given, which returns a list of what they return. Where a
    kernel would compute something else, it calls the modules one by one."""
    calls, result, count = of.calls, of.result, len(of.classes)

    def call_together(*given):
        modules, full = given[:count], given[count:]
        for module in modules:
            if not (_called_plainly(module) and runs_its_class(module)):
                break
        else:
            made = result(*given)
            if made is not None:
                return made if isinstance(made, list) else [made]
        return calls.run(full, lambda number, args, named: modules[number](*args, **named))

    return call_together


def runs_its_class(module: torch.nn.Module) -> bool:
    """True if its forward computes what its class's does."""
    return is_free(module) or is_set_on(module)
