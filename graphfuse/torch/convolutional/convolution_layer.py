"""Convolutions with bias, which cuDNN's engine runs in one kernel where torch runs two.

They are replaced if the engine is there. It runs calls for inference in 16 bits whose input is channels-last in memory:
``model.to(memory_format=torch.channels_last)`` makes a model's activations so.
"""

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.runtime import torch_private
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import roles
from graphfuse.torch.convolutional.layout_mode import outside_mode
from graphfuse.torch.operators.convolution import FORMATS, TYPES, planned, searched, why_not_engine

_CLASSES = (torch.nn.Conv2d, torch.nn.Conv3d)
_SPLIT_FROM = 1 << 31
"""Bytes of an input that a convolution of parts may split."""
_observed = torch_private.needs_dispatcher()


def forward(self: torch.nn.Conv2d | torch.nn.Conv3d, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's
    """Forward that replaces the class's own."""
    made = convolved(self, input)
    return type(self).forward(self, input) if made is None else made


@outside_mode
def convolved(
    conv: torch.nn.Conv2d | torch.nn.Conv3d, x: torch.Tensor, padding: tuple[int, ...] | None = None
) -> torch.Tensor | None:
    """The convolution of x by cuDNN's engine; None if that does not run it. padding: of zeros, instead of the
    module's."""
    if is_dynamo_compiling() or _observed():
        return None
    weight, bias = conv.weight, conv.bias  # read once, as modules look parameters up in Python
    options = conv.stride, padding or conv.padding, conv.dilation
    if not isinstance(x, torch.Tensor) or not _is_taken(conv, padding):
        return None
    if type(conv) not in _CLASSES and x.numel() * x.element_size() >= _SPLIT_FROM:
        return None
    if (made := planned(x, weight, bias, *options)) is not None:
        return made
    return searched(x, weight, bias, *options) if _is_supported(x, conv, weight, bias) else None


def _is_supported(
    x: torch.Tensor, conv: torch.nn.Conv2d | torch.nn.Conv3d, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    if not x.is_cuda or x.dtype not in TYPES or x.dim() != weight.dim():
        return False
    if x.shape[1] != conv.in_channels or not x.is_contiguous(memory_format=FORMATS[x.dim()]):
        return False
    if bias is None or torch.is_autocast_enabled("cuda"):
        return False
    has_gradients = torch.is_grad_enabled()
    for t in (x, weight, bias):
        if t.dtype is not x.dtype or t.device != x.device or t.requires_grad and has_gradients:
            return False
        if not torch_private.is_plain(t):
            return False
    return True


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of a convolution, and returns its entry; None for any other module, and without the engine."""
    if type(module) not in _CLASSES and roles.role(module) != roles.SPLIT:
        return None
    if why_not_engine() or not _is_taken(module) or not set_forward.is_free(module):
        return None
    set_forward.set_on(module, forward)
    return Entry(name, type(module).__name__, "convolution", "cuDNN's engine, for channels-last inputs of 16 bits")


def _is_taken(conv: torch.nn.Conv2d | torch.nn.Conv3d, padding: tuple[int, ...] | None = None) -> bool:
    """True if the engine takes such a convolution. Without a bias torch runs one kernel, too."""
    is_padded = padding is not None or conv.padding_mode == "zeros" and type(conv.padding) is tuple
    return conv.bias is not None and conv.groups == 1 and is_padded
