"""Replaces the forwards of modules of video autoencoders and lays out their weights channels-last, and undoes both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import fault, roles, wan
from graphfuse.torch.convolutional.frames import Cache, PendingSum, channels_last
from graphfuse.torch.operators.convolution import FORMATS, why_not_engine

_CHANGED_WEIGHTS = "_graphfuse_changed_weights"

_ENDS = (
    "the first convolution copies its input into channels-last, and the result is copied out of it, as callers have "
    "contiguous tensors"
)
_BECAME = {
    roles.RESIDUAL: "frames (norm, swish, convolution, add)",
    roles.ATTENTION: "frames (norm, attention)",
    roles.RESAMPLE: "frames (copy, convolution)",
} | dict.fromkeys((*roles.CONTAINERS, *roles.ENDS), "frames (its modules)")


def replace(name: str, module: torch.nn.Module, before_own: Callable[[torch.nn.Module], None]) -> Entry | None:
    """Sets the forward of a known module. Returns its entry; None for any other module. before_own: called with each
    norm that this forward bypasses, before a call first runs the module's own forward."""
    role, cls = roles.role(module), type(module)
    if role not in wan.FORWARDS:
        return None
    if not set_forward.is_free(module):
        return Entry(name, cls.__name__, why=set_forward.ALREADY_SET)
    if why := fault.of_module(module, role):
        return Entry(name, cls.__name__, why=why)
    function = _forward(role, cls, before_own)
    changes_weights(function, tuple(_lay_out_weights(module, role)))
    set_forward.set_on(module, function)
    return Entry(name, cls.__name__, _BECAME[role], _note(role))


def _note(role: str) -> str:
    if role in (roles.RESIDUAL, roles.RESAMPLE) and (why := why_not_engine()):
        return f"torch's convolution: {why}"
    return _ENDS if role in roles.ENDS else ""


def bypassed_norms(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Norms that the replacing forward of a known module computes itself."""
    role = roles.role(module)
    return [leaf for leaf in fault.leaves(module, role) if roles.role(leaf) == roles.NORM]


def changes_weights(function: FunctionType, names: tuple[str, ...]) -> None:
    """Declares the weights whose layout a module had changed when this function became its forward."""
    function.__dict__[_CHANGED_WEIGHTS] = names


def restore_weights(module: torch.nn.Module) -> None:
    """Restores the layout of weights, before the forward is removed. Pruning, for example, may have replaced some."""
    found = vars(module).get("forward")
    names = getattr(found.__func__, _CHANGED_WEIGHTS, ()) if isinstance(found, MethodType) else ()
    weights = dict(module.named_parameters(remove_duplicate=False)) if names else {}
    for name in names:
        if name in weights:
            lay_out(weights[name], torch.contiguous_format)


@torch.inference_mode(False)  # otherwise, weights would become tensors that cannot be trained
def lay_out(weight: torch.Tensor, memory_format: torch.memory_format) -> None:
    weight.data = weight.data.contiguous(memory_format=memory_format)


def _lay_out_weights(module: torch.nn.Module, role: str) -> Iterator[str]:
    """Lays out weights of convolutions channels-last. Returns the names of those that were not."""
    names = {leaf: name for name, leaf in module.named_modules()}
    for leaf in fault.leaves(module, role):
        weight = getattr(leaf, "weight", None)
        if isinstance(leaf, torch.nn.Conv2d | torch.nn.Conv3d) and weight.is_contiguous() and weight[0, 0].numel() > 1:
            lay_out(weight, FORMATS[weight.dim()])
            yield f"{names[leaf]}.weight"


def _forward(role: str, cls: type, before_own: Callable[[torch.nn.Module], None]) -> FunctionType:
    """Function that replaces a class's forward."""
    run, signature, is_end = wan.FORWARDS[role], inspect.signature(cls.forward), role in roles.ENDS

    def forward(self, *given, **named):
        try:
            of = signature.bind(self, *given, **named).arguments
        except TypeError:  # the own forward raises it again
            of = {}
        x, kept, position = of.get("x"), of.get("feat_cache"), of.get("feat_idx", [0])
        if not fault.is_fit(self, role, x) or not isinstance(kept, list | None):
            if not is_dynamo_compiling():
                for norm in bypassed_norms(self):
                    before_own(norm)
            return type(self).forward(self, *given, **named)
        more = {"first_chunk": of["first_chunk"]} if "first_chunk" in of else {}
        with torch.no_grad():
            start = x if is_end else channels_last(x)  # the first convolution copies its input in any case
            made = run(self, PendingSum(start), Cache(kept, position), **more).complete()
        return made.contiguous() if is_end else made

    return forward
