"""Graphs whose calls are given other shapes, and float64 to hold them against."""

import pytest
import torch

from graphfuse import heur_mode, norm_forward_phase
from support import graphs, oracle

OPEN, FALLBACK = [heur_mode.OPENSOURCE], [heur_mode.FALLBACK]
COLUMNS = 40
PLANS = [
    pytest.param(FALLBACK, "cpu", id="reference"),
    pytest.param(OPEN, "emulator", id="kernels", marks=pytest.mark.emulate),
]


def new(device="cpu", **types):
    return graphs.new(device=device, is_override_shape_enabled=True, **types)


def norm(device="cpu", rows=64, columns=COLUMNS, **types):
    """swish(rmsnorm(x)): tensors x, w, out."""
    g = new(device, **types)
    x, w = g.tensor([rows, columns], name="x", uid=1), g.tensor([1, columns], name="w", uid=2)
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    g.swish(y).set_output().set_name("out").set_uid(3)
    return g


def values(rows, columns=COLUMNS, seed=0):
    source = graphs.generator("cpu", seed)
    x, w = torch.randn(rows, columns, generator=source), torch.randn(1, columns, generator=source)
    return {"x": x, "w": w, "out": torch.full((rows, columns), float("nan"))}


def check(pack, rows=None):
    x = pack["x"][:rows]
    want = oracle.swish(oracle.rmsnorm(x, pack["w"], 1e-5)[0])
    torch.testing.assert_close(pack["out"][:rows].double(), want, rtol=1e-5, atol=1e-5)


def to(rows, columns=COLUMNS):
    """What execute is told of `norm`."""
    return [1, 3], [[rows, columns]] * 2
