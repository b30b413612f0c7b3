"""The layout of images in the encoders and decoders of diffusers' image autoencoders: channels-last from the first
convolution to the last.

Torch's convolutions of 16 bits compute in channels-last, and convert images and weights in each call if they are not.
Weights are converted once here. The first convolution then returns channels-last images, and the last one returns a
contiguous result, as the module's callers have it.
"""

from __future__ import annotations

import torch

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.autoencoders import replacement, roles
from graphfuse.torch.operators.convolution import TYPES
from graphfuse.torch.whole_models import convolution_layer

_NOTE = "weights of its convolutions are channels-last, and the last one returns a contiguous image"


def forward(self: torch.nn.Conv2d, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's spelling
    """Forward of a convolution whose weight was converted."""
    return convolution_layer.forward(self, input)


def last_forward(self: torch.nn.Conv2d, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """Forward of the last convolution."""
    return convolution_layer.forward(self, input).contiguous()


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Converts the weights of an encoder or decoder of images, and returns its entry; None for any other module, and
    for weights that are not of 16 bits."""
    if roles.role(module) != roles.IMAGES or not _is_free(getattr(module, "conv_out", None)):
        return None
    kind = type(module).__name__
    if module.conv_out.weight.dtype not in TYPES:
        return Entry(name, kind, why="its layout: weights are not of 16 bits")
    for conv in module.modules():
        if _is_free(conv):
            replacement.lay_out(conv.weight, torch.channels_last)
            set_forward.set_on(conv, last_forward if conv is module.conv_out else forward)
    return Entry(name, kind, "channels-last", _NOTE)


def _is_free(conv: object) -> bool:
    if type(conv) is not torch.nn.Conv2d or not set_forward.is_free(conv):
        return False
    weight = conv._parameters.get("weight")  # pruning, for example, has moved it, and makes one in each call
    return type(weight) is torch.nn.Parameter and weight.is_contiguous()


for _function in (forward, last_forward):
    replacement.changes_weights(_function, ("weight",))
