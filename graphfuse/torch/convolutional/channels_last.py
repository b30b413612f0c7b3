"""The layout of images and frames in encoders and decoders of diffusers' autoencoders: channels-last from the first
convolution to the last.

Torch's convolutions of 16 bits compute in channels-last, and convert their input and weight in each call if these are
not. Weights are converted once here. The first convolution then returns channels-last activations, and the result of
the whole is made contiguous, as callers have it.

Some functions of torch return contiguous tensors for channels-last ones. While an encoder or decoder that has such
functions runs its own code, they are replaced by others that compute the same in channels-last.
"""

from __future__ import annotations

from types import FunctionType, MethodType

import torch

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import replacement, roles, spatial
from graphfuse.torch.convolutional.layout_mode import LayoutMode, is_inference, outside_mode
from graphfuse.torch.operators.convolution import FORMATS, TYPES

_NOTE = "weights of its convolutions are channels-last, and its result is contiguous"


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Converts the weights of an encoder or decoder, and returns its entry; None for any other module. Its forward may
    have been set before. Sets the forward of wavelets."""
    kind, role = type(module).__name__, roles.role(module)
    if role == roles.WAVELETS and set_forward.is_free(module):
        set_forward.set_on(module, _contiguously)
        return Entry(name, kind, "contiguous", "its convolutions are of few channels")
    if role not in (roles.LAYOUT_KEPT, roles.LAYOUT_LOST):
        return None
    if not set_forward.is_free(module) and not set_forward.is_set_on(module):
        return Entry(name, kind, why=set_forward.ALREADY_SET)
    convolutions = {of: conv for of, conv in module.named_modules() if _is_free(conv)}
    if not convolutions or any(conv.weight.dtype not in TYPES for conv in convolutions.values()):
        return Entry(name, kind, why="its layout: weights are not of 16 bits")
    function = _forward(module, in_mode=role == roles.LAYOUT_LOST)
    for conv in convolutions.values():
        replacement.lay_out(conv.weight, FORMATS[conv.weight.dim()])
    replacement.changes_weights(function, tuple(f"{of}.weight" for of in convolutions))
    set_forward.set_on(module, function)
    return Entry(name, kind, "channels-last", _NOTE)


def _is_free(conv: object) -> bool:
    if not isinstance(conv, torch.nn.Conv2d | torch.nn.Conv3d) or not set_forward.is_free(conv):
        return False
    weight = conv._parameters.get("weight")  # pruning, for example, has moved it, and makes one in each call
    return type(weight) is torch.nn.Parameter and weight.is_contiguous()


def _forward(module: torch.nn.Module, in_mode: bool) -> FunctionType:
    found = vars(module).get("forward")
    own = found.__func__ if isinstance(found, MethodType) else type(module).forward

    def forward(self, *given, **named):
        if not in_mode or not is_inference():
            return _contiguous(own(self, *given, **named))
        with LayoutMode():
            given, named = map(_laid_out, given), {name: _laid_out(value) for name, value in named.items()}
            made = own(self, *given, **named)
        return _contiguous(made)

    return forward


@outside_mode
def _contiguously(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward that replaces that of wavelets, whose own functions then run on contiguous tensors."""
    return type(self).forward(self, _contiguous(hidden_states))


def _laid_out(given: object) -> object:
    return given.contiguous(memory_format=FORMATS[given.dim()]) if spatial.has_layout(given) else given


def _contiguous(made: object) -> object:
    """The result of a forward: a tensor, or a tuple that begins with one."""
    if isinstance(made, tuple):
        return (_contiguous(made[0]), *made[1:])
    return made.contiguous() if spatial.is_channels_last(made) else made
