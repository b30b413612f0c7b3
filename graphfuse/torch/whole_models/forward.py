"""Forwards for modules that one kernel computes, and functions for several modules that one kernel computes together.

If a kernel would compute something else than a call requires (autocast, more arguments), the class's own forward runs.
"""

import inspect
from collections.abc import Callable
from types import FunctionType

import torch

from graphfuse.torch.analysis.set_forward import is_plain
from graphfuse.torch.analysis.trace import CallOperand, CallSequence, TracedCall, required
from graphfuse.torch.modules.norms import LayerNorm, RMSNorm
from graphfuse.torch.whole_models.fused_calls import FusedCalls, fused
from graphfuse.torch.whole_models.tensor_parallel import DeferredSum, normed


def recognized(module: torch.nn.Module) -> FusedCalls | str | None:
    """The calls of a module's forward, or the reason why no kernel computes it. None if the module has children, or if
    no kernel computes its forward and its class is not called a norm."""
    if isinstance(module, RMSNorm | LayerNorm):
        return "it is graphfuse's"
    if next(module.children(), None) is not None or isinstance(module, torch.nn.GroupNorm):
        return None
    found = _fused(module)
    return found if isinstance(found, FusedCalls) or _is_called_norm(type(module)) else None


def _fused(module: torch.nn.Module) -> FusedCalls | str:
    try:
        names = required(module)
    except (TypeError, ValueError):  # a forward without a signature
        names = []
    if not names:
        return "its forward is given nothing"
    given = {name: CallOperand(n) for n, name in enumerate(names)}
    return fused(
        CallSequence(len(names), (TracedCall(0, (), given),), (len(names),)), (module,), without_gradients=True
    )


def _is_called_norm(cls: type) -> bool:
    """True if a class is named a norm, except for torch's norms that do not normalize rows."""
    is_own = cls.__module__.startswith("torch.") and cls not in (torch.nn.RMSNorm, torch.nn.LayerNorm)
    return "norm" in cls.__name__.lower() and not is_own


def forward_of(of: FusedCalls, cls: type) -> FunctionType:
    """Function that replaces a class's forward, whose calls are given."""
    result = of.result
    names = [*of.calls.calls[0].named]
    count, signature = len(names), [*inspect.signature(cls.forward).parameters][1:]
    in_order = next((n for n, name in enumerate(names) if signature[n] != name), count)

    def forward(self, *given, **named):
        if given and type(given[0]) is DeferredSum and count == 1 and (y := normed(of, self, given[0])) is not None:
            return y
        if len(given) + len(named) == count and len(given) <= in_order:
            full = (*given, *[named.get(name) for name in names[len(given) :]]) if named else given
            y = result(self, *full)
            if y is not None:
                return y
        return type(self).forward(self, *given, **named)

    return forward


def joint_call(of: FusedCalls) -> Callable[..., object]:
    """Function of modules followed by the arguments of their calls. It returns a list of their results. If a kernel
    would compute something else, it calls the modules one by one."""
    calls, result, count = of.calls, of.result, len(of.classes)

    def call_modules(*given):
        modules, full = given[:count], given[count:]
        # A deferred sum belongs to the call of the norm that reads it.
        if not any(type(t) is DeferredSum for t in full) and all(map(is_plain, modules)):
            made = result(*given)
            if made is not None:
                return made if isinstance(made, list) else [made]
        return calls.of_modules(modules, full)

    return call_modules
