"""Setting of a forward on a module itself, as ``kernels.kernelize`` does it. Class, parameters, hooks and state dict
stay what they are. ``copy.deepcopy`` binds the forward to the copy. pickle stores a module without it; loaded again,
that runs its class's forward."""

from types import FunctionType, MethodType

import torch

from graphfuse.runtime import torch_private

_MARK = "_graphfuse_fused"
ALREADY_SET = "its forward is set on the module already, by something else"
"""Reason why a module keeps the forward that it has."""

RUN_ON = frozenset({"cuda", "cpu"})
"""Types of devices on which kernels that replace a forward run."""

_called_plainly = torch_private.only_calls_forward()


def set_on(module: torch.nn.Module, function: FunctionType) -> None:
    """Makes `function`, whose first argument is the module, the module's forward."""
    function.__dict__[_MARK] = True
    function.__name__ = "forward"  # by which pickle finds it
    function.__wrapped__ = type(module).forward  # shows its arguments in inspect.signature
    module.forward = MethodType(function, module)


def is_set_on(module: torch.nn.Module) -> bool:
    """True if the module's forward was set by `set_on`."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, _MARK)


def is_free(module: torch.nn.Module) -> bool:
    """True if nothing else set the module's forward: it is that of its class, which pickle and ``kernelize`` may have
    set as such."""
    found = vars(module).get("forward")
    return found is None or isinstance(found, MethodType) and found.__func__ is type(module).forward


def runs_its_class(module: torch.nn.Module) -> bool:
    """True if the module's forward computes what its class's does."""
    if (found := vars(module).get("forward")) is None:  # looked up once: calls of several modules run this each time
        return True
    return isinstance(found, MethodType) and (found.__func__ is type(module).forward or hasattr(found.__func__, _MARK))


def is_plain(module: torch.nn.Module) -> bool:
    """True if calling a module runs its class's forward, or one that is set in its place, and nothing else."""
    return _called_plainly(module) and runs_its_class(module)
