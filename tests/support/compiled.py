"""What tests of ``torch.compile(backend="graphfuse")`` share."""

import torch

from graphfuse.torch import compile_report

HIDDEN, EPS = 32, 1e-5


def rows(n, dtype=torch.float32, seed=1):
    return torch.randn(n, 3, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def became():
    """Of the last graph."""
    return [e.became for e in compile_report().graphs[-1].entries]
