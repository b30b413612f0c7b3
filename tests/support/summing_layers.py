"""Layers with a residual sum before a norm, small and with random weights."""

import torch

COLUMNS = 16


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.most = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.LayerNorm(COLUMNS), 4.0


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def made(cls, dtype=torch.float32):
    torch.manual_seed(2)
    return cls().to(dtype).eval()
