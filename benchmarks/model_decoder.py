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


class Full(DynamicLayer):
    """Keys and values of a layer whose cache is full: the new token is written over the last one.

    So each call does the same work at the same addresses, as a CUDA graph asks for. `DynamicLayer` would copy it all.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.is_sliding, self.seen = window is not None, min(keys.shape[-2], window or keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
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
        shape = (len(kinds), sequences, config.num_key_value_heads, tokens, config.head_dim)
        # Held in the model's type, as a cast of the module does it.
        self.register_buffer("keys", torch.randn(shape, device=model.device))
        self.register_buffer("values", torch.randn(shape, device=model.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache(layers=[Full(self.keys[i], self.values[i], window) for i, window in enumerate(self.windows)])
        return self.model(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state
