"""Attention between the frames of HunyuanVideo 1.5's autoencoder: no place reads a later frame.

The class fills the mask row by row, one launch for each place of the latents. Here one copy fills it.
"""

import math

import torch
from torch.nn import functional

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import roles
from graphfuse.torch.convolutional.layout_mode import is_inference, outside_mode


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of such an attention, and returns its entry; None for any other module."""
    if roles.role(module) != roles.MASKED_ATTENTION or not set_forward.is_free(module):
        return None
    if roles.role_of(type(module).prepare_causal_attention_mask) != roles.CAUSAL_MASK:
        return None
    set_forward.set_on(module, forward)
    return Entry(name, type(module).__name__, "attention", "its mask is filled in one copy")


def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward that replaces the class's."""
    return _attended(self, x) if _is_taken(self, x) else type(self).forward(self, x)


@outside_mode
def _attended(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = self.norm(x)
    _, _, frames, height, width = y.shape
    query, key, value = (_rows(project(y)) for project in (self.to_q, self.to_k, self.to_v))
    mask = causal_mask(frames, height * width, query.dtype, query.device)
    made = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    made = made.reshape(1, frames, height, width, made.shape[-1]).permute(0, 4, 1, 2, 3)
    return self.proj_out(made) + x


def _rows(t: torch.Tensor) -> torch.Tensor:
    """Frames, [n, channels, frames, height, width], as contiguous rows of one head, [n, 1, places, channels]."""
    return t.movedim(1, -1).flatten(1, 3).unsqueeze(1).contiguous()


def causal_mask(frames: int, places: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Summand of the scores of attention between all places of frames, [1, frames * places, frames * places]: -infinity
    where a key is of a later frame than the query, else 0."""
    later = torch.full((frames, frames), -math.inf, dtype=dtype, device=device).triu(1)
    return later[:, None, :, None].expand(-1, places, -1, places).reshape(1, frames * places, frames * places)


def _is_taken(self: torch.nn.Module, x: object) -> bool:
    is_usual = isinstance(x, torch.Tensor) and x.dim() == 5 and x.shape[0] == 1  # the class has no mask for others
    return is_usual and is_inference() and "prepare_causal_attention_mask" not in vars(self)
