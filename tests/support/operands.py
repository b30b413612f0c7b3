"""Operands of products as data, and what their sums are held to."""

import numpy as np
import torch

from support import graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT, HALF, TORCH

TYPES = [BF16, HALF, FLOAT, E4M3, E5M2]


def values(shape, dtype, seed, order=None):
    """Random values of a type; order: of the axes in memory, outermost first."""
    order = range(len(shape)) if order is None else order
    lying = torch.randn([shape[a] for a in order], generator=graphs.generator("cpu", seed)).to(TORCH[dtype])
    return lying.permute(*np.argsort(order).tolist())


def tensor(g, data, dtype, name):
    return g.tensor(data.shape, data.stride(), dtype, name=name)


def hold(got, exact, terms):
    """got is exact rounded to its type once, give or take float32's error in a sum of so many terms."""
    exact = torch.from_numpy(exact)
    error = (got.double() - exact).abs()
    close = error <= 2e-7 * terms**0.5 * 8 + 1e-6 * exact.abs()
    if got.dtype is not torch.float32:
        close |= oracle.ulps(got, oracle.rounded(exact, got.dtype)) <= 1
    assert close.all(), f"{int((~close).sum())} elements are off, by up to {error.max()}"
