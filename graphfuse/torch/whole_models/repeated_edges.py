"""Convolutions of LTX-Video, which repeat the first and last frame before they convolve.

The class makes a tensor of each repeated frame and joins them with the frames. One copy suffices.
"""

import torch

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.autoencoders import roles, spatial
from graphfuse.torch.autoencoders.layout_mode import is_inference, outside_mode

_edge_padded = outside_mode(spatial.edge_padded)


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of such a convolution, and returns its entry; None for any other module."""
    if roles.role(module) != roles.REPEATED or not set_forward.is_free(module):
        return None
    set_forward.set_on(module, forward)
    told = "its first and last frame are repeated in one copy, in channels-last"
    return Entry(name, type(module).__name__, "edges", told)


def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward that replaces the class's own."""
    if not is_inference() or not spatial.is_channels_last(hidden_states) or hidden_states.dim() != 5:
        return type(self).forward(self, hidden_states)
    more = self.kernel_size[0] - 1
    begin, end = (more, 0) if self.is_causal else (more // 2, more // 2)
    return self.conv(_edge_padded(hidden_states, (0, 0, 0, 0, begin, end)))
