"""The layout of images and frames in encoders and decoders of diffusers' autoencoders: channels-last from the first
convolution to the last.

Torch's convolutions of 16 bits compute in channels-last, and convert their input and weight in each call if these are
not. Weights are converted once here. The first convolution then returns channels-last activations, and the result of
the whole is made contiguous, as callers have it.

Some functions of torch return contiguous tensors for channels-last ones. While an encoder or decoder of frames runs its
own code, they are replaced by others that compute the same in channels-last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.autoencoders import replacement, roles, spatial
from graphfuse.torch.operators.convolution import FORMATS, TYPES

_PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types of tensors. Subclasses have functions of their own."""
_NOTE = "weights of its convolutions are channels-last, and its result is contiguous"


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Converts the weights of an encoder or decoder, and returns its entry; None for any other module. Its forward may
    have been set before."""
    if (role := roles.role(module)) not in (roles.IMAGES, roles.FRAMES):
        return None
    kind = type(module).__name__
    if not set_forward.is_free(module) and not set_forward.is_set_on(module):
        return Entry(name, kind, why=set_forward.ALREADY_SET)
    convolutions = {of: conv for of, conv in module.named_modules() if _is_free(conv)}
    if not convolutions or any(conv.weight.dtype not in TYPES for conv in convolutions.values()):
        return Entry(name, kind, why="its layout: weights are not of 16 bits")
    function = _forward(module, is_of_frames=role == roles.FRAMES)
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


def _forward(module: torch.nn.Module, is_of_frames: bool) -> FunctionType:
    found = vars(module).get("forward")
    own = found.__func__ if isinstance(found, MethodType) else type(module).forward

    def forward(self, *given, **named):
        if not is_of_frames or is_dynamo_compiling() or torch.is_grad_enabled():
            return _contiguous(own(self, *given, **named))
        with _ChannelsLast():
            given, named = map(_laid_out, given), {name: _laid_out(value) for name, value in named.items()}
            made = own(self, *given, **named)
        return _contiguous(made)

    return forward


def _laid_out(given: object) -> object:
    return given.contiguous(memory_format=FORMATS[given.dim()]) if _has_layout(given) else given


def _has_layout(given: object) -> bool:
    """True for images and frames."""
    return isinstance(given, torch.Tensor) and given.dim() in FORMATS


def _contiguous(made: object) -> object:
    """The result of a forward: a tensor, or a tuple that begins with one."""
    if isinstance(made, tuple):
        return (_contiguous(made[0]), *made[1:])
    return made.contiguous() if spatial.is_channels_last(made) else made


class _ChannelsLast(TorchFunctionMode):
    """Context in which functions of torch keep the layout of channels-last tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's
        call = _CALLS.get(function, function) if _PLAIN.issuperset(types) else function
        return call(*args, **(kwargs or {}))


def _padded(
    input: torch.Tensor,  # noqa: A002 - as torch's, here and below
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> torch.Tensor:
    """``pad``, whose copies of edges are channels-last for every input."""
    is_of_all = input.dim() in FORMATS and len(pad) == 2 * (input.dim() - 2)
    if mode == "replicate" and value is None and is_of_all and min(pad) >= 0 and 0 not in input.shape:
        return spatial.edge_padded(input, pad)
    return functional.pad(input, pad, mode, value)


def _interpolated(
    input: torch.Tensor,  # noqa: A002
    size: object = None,
    scale_factor: object = None,
    mode: str = "nearest",
    *given: object,
    **named: object,
) -> torch.Tensor:
    """``interpolate``, whose nearest elements are channels-last for every input."""
    if mode == "nearest" and not given and not any(named.values()) and input.dim() in FORMATS:
        if (scales := spatial.scales(input, size, scale_factor)) is not None:
            return spatial.nearest(input, scales)
    return functional.interpolate(input, size, scale_factor, mode, *given, **named)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0, **named: object) -> torch.Tensor:
    """``torch.cat``, which is channels-last along frames, height or width for every input."""
    if not named and isinstance(tensors, list | tuple) and tensors and _has_layout(tensors[0]):
        first, axis = tensors[0], dim + tensors[0].dim() if dim < 0 else dim
        if 2 <= axis < first.dim() and all(_is_joinable(t, first, axis) for t in tensors):
            return spatial.joined(tensors, axis)
    return torch.cat(tensors, dim, **named)


def _is_joinable(t: object, first: torch.Tensor, dim: int) -> bool:
    if not isinstance(t, torch.Tensor) or t.dim() != first.dim():
        return False
    if t.dtype is not first.dtype or t.device != first.device:
        return False
    return all(a == b for axis, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if axis != dim)


def _kept(input: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
    """``Tensor.contiguous``, which leaves a channels-last tensor as it is."""
    if not given and not named and spatial.is_channels_last(input):
        return input
    return torch.Tensor.contiguous(input, *given, **named)


def _viewed(input: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
    """``Tensor.view``. Own code may have made the tensor contiguous for it."""
    if spatial.is_channels_last(input) and not _is_type(*given, *named.values()):
        return input.reshape(*given, **named)
    return torch.Tensor.view(input, *given, **named)


def _is_type(shape: object = None, *_: object) -> bool:
    return isinstance(shape, torch.dtype)


_CALLS: dict[object, Callable[..., torch.Tensor]] = {
    functional.pad: _padded,
    functional.interpolate: _interpolated,
    torch.Tensor.contiguous: _kept,
    torch.Tensor.view: _viewed,
} | dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _joined)
"""Functions of torch that are replaced, and what replaces them."""
