"""Decoder layers of transformers as modules from vectors to vectors."""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer


class Layers(nn.Module):
    """All tokens at once: [sequences, tokens, hidden]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class Held(nn.Module):
    """Keys and values of a layer, [sequences, heads, tokens, columns], in tensors of their own, and the last place.

    As in the static cache of transformers, compilers write a token at a place that a tensor has without copying others.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        super().__init__()
        # Held in the model's type, as a cast of the module does it.
        self.register_buffer("keys", torch.randn(shape, device=device))
        self.register_buffer("values", torch.randn(shape, device=device))
        self.register_buffer("last", torch.tensor([shape[2] - 1], device=device))


class Full(DynamicLayer):
    """Keys and values of a layer whose cache is full: the new token is written over the last one.

    So each call does the same work at the same addresses, as a CUDA graph asks for. `DynamicLayer` would copy it all.
    """

    def __init__(self, held: Held, window: int | None):
        super().__init__()
        self.keys, self.values, self.last, self.is_initialized = held.keys, held.values, held.last, True
        keys = held.keys
        self.is_sliding, self.seen = window is not None, min(keys.shape[-2], window or keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.last, key_states)
        self.values.index_copy_(2, self.last, value_states)
        return self.keys[:, :, -self.seen :], self.values[:, :, -self.seen :]

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen, self.keys.shape[-2] - self.seen


class Cached(nn.Module):
    """One token for each sequence, [sequences, 1, hidden], after `tokens` - 1 others."""

    def __init__(self, model: nn.Module, sequences: int, tokens: int):
        super().__init__()
        self.model, config = model, model.config
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        shape = (sequences, config.num_key_value_heads, tokens, config.head_dim)
        self.held = nn.ModuleList(Held(shape, model.device) for _ in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache(layers=[Full(held, window) for held, window in zip(self.held, self.windows, strict=True)])
        return self.model(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state
