"""Group norms and what they norm, and what is exact."""

import torch
from torch.nn import functional as F

from graphfuse.torch.convolutional import group_norm

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def drawn(*shape, dtype=torch.float32, last=False, seed=1):
    """Far from zero, as what is normalized may be."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 9
    return x.to(dtype).movedim(1, -1).contiguous().movedim(-1, 1) if last else x.to(dtype)


def norm(groups=4, channels=16, dtype=torch.float32):
    torch.manual_seed(0)
    made = torch.nn.GroupNorm(groups, channels, eps=1e-3)
    with torch.no_grad():
        made.weight.normal_()
        made.bias.normal_()
    return made.to(dtype).requires_grad_(False)


def exact(of, x):
    return F.group_norm(x.double(), of.num_groups, of.weight.double(), of.bias.double(), of.eps)


def run_from(least, monkeypatch):
    """Kernels run for group norms of so many elements and more until the test ends, also where others have run."""
    monkeypatch.setattr(group_norm, "LEAST", least)
    monkeypatch.setattr(group_norm, "LEAST_CHANNELS_LAST", least)
    monkeypatch.setattr(group_norm, "_prepared", {})
