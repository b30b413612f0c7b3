"""Blocks of models that are no decoder layers, in plain torch, and the dense part of one that has experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Of all tokens to all."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """A block of a diffusion transformer (Peebles & Xie, 2023, adaLN): norms without weights, scaled, shifted and
    gated by what a conditioning vector says."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x: [samples, tokens, width]. condition: [samples, width]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(functional.silu(condition))[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(functional.gelu(self.up(y), approximate="tanh"))


class WanNorm(nn.Module):
    """RMS norm over channels as the WAN VAE writes it: of length 1, then scaled."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(x, dim=1) * self.scale * self.gamma


class CausalConv(nn.Conv3d):
    """A frame sees itself and the two before it."""

    def __init__(self, channels: int):
        super().__init__(channels, channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.pad(x, (1, 1, 1, 1, 2, 0)))


class WanBlock(nn.Module):
    """A residual block of the WAN VAE's decoder: twice norm, SiLU and a causal convolution, plus the input."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm1, self.norm2 = WanNorm(channels), WanNorm(channels)
        self.conv1, self.conv2 = CausalConv(channels), CausalConv(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [samples, channels, frames, height, width]."""
        y = self.conv1(functional.silu(self.norm1(x)))
        return x + self.conv2(functional.silu(self.norm2(y)))


class Stack(nn.Module):
    """Blocks one after another, each with the same conditions."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, *conditions: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *conditions)
        return x


class Rotated(nn.Module):
    """Blocks one after another, that are given a rotation behind their conditions: cosines and sines of each place."""

    def __init__(self, blocks: list[nn.Module], rotation: tuple[torch.Tensor, torch.Tensor]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("cos", rotation[0])
        self.register_buffer("sin", rotation[1])

    def forward(self, x: torch.Tensor, *conditions: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *conditions, (self.cos, self.sin))
        return x


class DenseExperts(nn.Module):
    """GPT-OSS's experts without a router: one gated product as wide as the experts that a token meets."""

    def __init__(self, width: int, inner: int, limit: float = 7.0, alpha: float = 1.702):
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)
        self.limit, self.alpha = limit, alpha

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """With the router's scores in second place, of which there are none."""
        gate, up = self.gate_up(x).chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down((up + 1) * gate * torch.sigmoid(gate * self.alpha)), None
