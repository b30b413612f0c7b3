"""Convolutions of LTX-Video and Cosmos, which repeat the first frame (LTX-Video also the last) before they convolve.

The classes make a tensor of the repeated frames and join it with the frames, and Cosmos's pads height and width with
zeros. One copy suffices, and the convolution pads with zeros.
"""

import torch
from torch.nn import functional

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import roles, spatial
from graphfuse.torch.convolutional.convolution_layer import convolved
from graphfuse.torch.convolutional.layout_mode import is_inference, outside_mode


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of such a convolution, and returns its entry; None for any other module."""
    function = _FORWARDS.get(roles.role(module))
    if function is None or not set_forward.is_free(module):
        return None
    set_forward.set_on(module, function)
    return Entry(name, type(module).__name__, "edges", "frames are repeated in one copy, in channels-last")


def forward_of_both(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward that replaces that of a convolution which repeats the first and the last frame."""
    made = _of_both(self, hidden_states)
    return type(self).forward(self, hidden_states) if made is None else self.conv(made)


def forward_of_first(self: torch.nn.Conv3d, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward that replaces that of a convolution which repeats the first frame."""
    made = _of_first(self, hidden_states)
    return type(self).forward(self, hidden_states) if made is None else made


@outside_mode
def _of_both(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The frames that are convolved; None if the own forward is to run."""
    if not _is_taken(x):
        return None
    more = self.kernel_size[0] - 1
    begin, end = (more, 0) if self.is_causal else (more // 2, more // 2)
    return spatial.edge_padded(x, (0, 0, 0, 0, begin, end))


@outside_mode
def _of_first(self: torch.nn.Conv3d, x: torch.Tensor) -> torch.Tensor | None:
    """The result; None if the own forward is to run."""
    (left, *others), count = self.spatial_pad, self.temporal_pad
    is_usual = others == [left] * 3 and min(left, count) >= 0 and self.padding == (0, 0, 0)
    if not is_usual or (self.pad_mode, self.padding_mode) != ("constant", "zeros") or not _is_taken(x):
        return None
    x = spatial.edge_padded(x, (0, 0, 0, 0, count, 0)) if count else x
    if (made := convolved(self, x, padding := (0, left, left))) is not None:
        return made
    if x.shape[0] == 1:  # with other strides of one sample, torch's result would be contiguous
        x = x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))
    return functional.conv3d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


def _is_taken(x: torch.Tensor) -> bool:
    return is_inference() and spatial.is_channels_last(x) and x.dim() == 5 and 0 not in x.shape


_FORWARDS = {roles.REPEATED: forward_of_both, roles.FIRST_REPEATED: forward_of_first}
