"""A forward that is set on a module itself, as ``kernels.kernelize`` does it: class, parameters, hooks and state dict
stay what they are, ``copy.deepcopy`` binds it to the copy, and pickle stores a module without it, which then runs its
class's own.
"""

from types import FunctionType, MethodType

import torch

from graphfuse.runtime import torch_private

_MARK = "_graphfuse_fused"
TAKEN = "its forward is set on the module already, by something else"
"""Why a module keeps the forward that it has."""

RUN_ON = frozenset({"cuda", "cpu"})
"""Types of devices that kernels in the place of a forward run on."""

_called_plainly = torch_private.only_calls_forward()


def set_on(module: torch.nn.Module, function: FunctionType) -> None:
    """Makes `function`, whose first argument is the module, its forward."""
    function.__dict__[_MARK] = True
    function.__wrapped__ = type(module).forward  # whose arguments inspect.signature tells
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


def runs_its_class(module: torch.nn.Module) -> bool:
    """True if its forward computes what its class's does."""
    if (found := vars(module).get("forward")) is None:  # asked for once, as calls of several modules do it each time
        return True
    return isinstance(found, MethodType) and (found.__func__ is type(module).forward or hasattr(found.__func__, _MARK))


def is_plain(module: torch.nn.Module) -> bool:
    """True if calling a module runs its class's forward, or one that is set in its place, and nothing else."""
    return _called_plainly(module) and runs_its_class(module)
