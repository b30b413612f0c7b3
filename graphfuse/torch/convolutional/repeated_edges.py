"""Convolutions of LTX-Video, LTX-2 and Cosmos, which repeat the first frame, those of LTX also the last, before they
convolve.

The classes make a tensor of the repeated frames and join it with the frames. Height and width are padded with zeros, or
by reflection in LTX-2's decoder. One copy suffices, and the convolution pads with zeros.
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
    made = _of_both(self, hidden_states, self.is_causal)
    return type(self).forward(self, hidden_states) if made is None else made


def forward_by_call(self: torch.nn.Module, hidden_states: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """The same, where a call says whether only the first frame is repeated."""
    made = _of_both(self, hidden_states, causal)
    return type(self).forward(self, hidden_states, causal) if made is None else made


def forward_of_first(self: torch.nn.Conv3d, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward that replaces that of a convolution which repeats the first frame."""
    made = _of_first(self, hidden_states)
    return type(self).forward(self, hidden_states) if made is None else made


@outside_mode
def _of_both(self: torch.nn.Module, x: torch.Tensor, causal: bool) -> torch.Tensor | None:
    """The result; None if the own forward is to run."""
    if not _is_taken(x):
        return None
    more, conv = self.kernel_size[0] - 1, self.conv
    begin, end = (more, 0) if causal else (more // 2, more // 2)
    if not _reflects(conv, x):
        return conv(spatial.edge_padded(x, (0, 0, 0, 0, begin, end)))
    x = spatial.edge_padded(x, (*conv._reversed_padding_repeated_twice[:4], begin, end), "reflect")
    return _convolved(conv, x, (0, 0, 0))


def _reflects(conv: object, x: torch.Tensor) -> bool:
    """True for a convolution that reflects height and width, as x has enough."""
    if type(conv) is not torch.nn.Conv3d or conv.padding_mode != "reflect" or not set_forward.is_plain(conv):
        return False
    (width, _, height, _), frames = conv._reversed_padding_repeated_twice[:4], conv._reversed_padding_repeated_twice[4:]
    return not any(frames) and height < x.shape[3] and width < x.shape[4]


def _convolved(conv: torch.nn.Conv3d, x: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    """The convolution of x, channels-last, padded with zeros."""
    if (made := convolved(conv, x, padding)) is not None:
        return made
    if x.shape[0] == 1:  # with other strides of one sample, torch's result would be contiguous
        x = x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))
    return functional.conv3d(x, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups)


@outside_mode
def _of_first(self: torch.nn.Conv3d, x: torch.Tensor) -> torch.Tensor | None:
    """The result; None if the own forward is to run."""
    (left, *others), count = self.spatial_pad, self.temporal_pad
    is_usual = others == [left] * 3 and min(left, count) >= 0 and self.padding == (0, 0, 0)
    if not is_usual or (self.pad_mode, self.padding_mode) != ("constant", "zeros") or not _is_taken(x):
        return None
    x = spatial.edge_padded(x, (0, 0, 0, 0, count, 0)) if count else x
    return _convolved(self, x, (0, left, left))


def _is_taken(x: torch.Tensor) -> bool:
    return is_inference() and spatial.is_channels_last(x) and x.dim() == 5 and 0 not in x.shape


_FORWARDS = {
    roles.REPEATED: forward_of_both,
    roles.REPEATED_BY_CALL: forward_by_call,
    roles.FIRST_REPEATED: forward_of_first,
}
