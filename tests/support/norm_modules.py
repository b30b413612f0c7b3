"""Modules that are norms, as models write them."""

import torch
from torch.nn import functional as F

HIDDEN = 64
HALF = torch.bfloat16


class LlamaNorm(torch.nn.Module):
    def __init__(self, columns=HIDDEN, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class GatedNorm(LlamaNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states) * F.silu(gate)
