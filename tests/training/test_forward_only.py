"""Operators without gradients: one kernel each, what they compute on it, and what torch asks of operators."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse import VariantPackError
from graphfuse.torch.operators import declared as operators

pytestmark = pytest.mark.torch

EPS, NEXT = 1e-5, 1e-3
HALF = torch.bfloat16


def drawn(*shape, dtype=HALF, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def llama(x, w, eps):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.emulate
def test_a_sandwich_is_one_kernel(kernels):
    x, r, w, v = drawn(6, 72), drawn(6, 72, seed=1), drawn(72, seed=2), drawn(72, seed=3)
    y, total = operators.OF_MODELS["llama_rms_norm_add_norm"].run(x, r, w, v, EPS, NEXT)
    assert kernels["llama_rms_norm_add_norm"] == [True]
    want = llama(x, w, EPS) + r
    assert torch.equal(total, want)
    torch.testing.assert_close(y, llama(want, v, NEXT), rtol=0.01, atol=0)


@pytest.mark.emulate
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_a_norm_along_channels_is_one_kernel_in_either_layout(layout, kernels):
    x = drawn(1, 32, 2, 4, 6).contiguous(memory_format=layout)
    w, b = drawn(32, seed=1), drawn(32, seed=2)
    y = operators.OF_MODELS["rounded_unit_norm_silu"].run(x, w, b, 1e-12, 32**0.5, -4)
    assert kernels["rounded_unit_norm_silu_rows"] == [True]
    assert y.stride() == x.stride()
    want = F.silu(F.normalize(x, dim=1) * 32**0.5 * w.view(-1, 1, 1, 1) + b.view(-1, 1, 1, 1))
    torch.testing.assert_close(y, want, rtol=0.02, atol=0.01)
    assert (y != want).float().mean() < 0.02


def adapted(x, residual, scale, shift, gate):
    total = x * gate + residual
    apart = total - total.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + scale) + shift, total


@pytest.mark.emulate
def test_a_gated_sum_and_its_adaptive_norm_are_one_kernel(kernels):
    """Of chunks of one tensor, where they are."""
    x, r = drawn(2, 5, 72), drawn(2, 5, 72, seed=1)
    chunks = drawn(2, 1, 3 * 72, seed=2).chunk(3, -1)
    for gates in (chunks[2:], (None,)):
        made = operators.ADD_ADA_LAYER_NORM.run(x, r, *chunks[:2], *gates, EPS)
        wide = (t.double() if t is not None else 1.0 for t in (x, r, *chunks[:2], *gates))
        for got, want in zip(made, adapted(*wide), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0.51 * torch.finfo(HALF).eps, atol=1e-5)
    assert kernels["add_ada_layer_norm"] == [True]


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 48), (1, 1, 48), (48,), (2, 5, 48)], ids=str)
def test_a_gated_sum_and_its_adaptive_norm(shape, dtype):
    given = [drawn(*s, dtype=dtype, seed=n) for n, s in enumerate(((2, 5, 48), (2, 5, 48), shape, shape, shape))]
    made = operators.ADD_ADA_LAYER_NORM.run(*given, EPS)
    for got, want in zip(made, adapted(*(t.double() for t in given)), strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), want, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-5)


def test_a_gate_that_does_not_fit_is_refused():
    x, scale = drawn(2, 5, 48), drawn(2, 1, 48)
    with pytest.raises(VariantPackError, match=r"gate has shape \(2, 48\); accepted: \(2, 1, 48\)"):
        operators.ADD_ADA_LAYER_NORM.run(x, x, scale, scale, scale[:, 0], EPS)


def test_opcheck():
    x, r, w = drawn(3, 64, dtype=torch.float32), drawn(3, 64, dtype=torch.float32), drawn(64, dtype=torch.float32)
    s, rows = drawn(3, 1, 64, dtype=torch.float32), [t.view(3, 1, 64) for t in (x, r)]
    video = drawn(2, 16, 3, 4, dtype=torch.float32)
    for name, arguments in (
        ("rms_norm_add_norm", (x, r, w, w, EPS, NEXT)),
        ("rms_norm_add_norm", (x, r, None, None, EPS, NEXT)),
        ("add_ada_layer_norm", (*rows, s, s, s, EPS)),
        ("add_ada_layer_norm", (*rows, s, s, None, EPS)),
        ("unit_norm", (video, w[:16], None, 1e-12, 4.0, -3)),
        ("unit_norm_silu", (video, w[:16], w[:16], 1e-12, 4.0, -3)),
    ):
        operator = getattr(torch.ops.graphfuse, name).default
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_results_have_no_gradient():
    x = drawn(3, 64).requires_grad_()
    assert not any(t.requires_grad for t in operators.OF_MODELS["rms_norm_add_norm"].run(x, x, None, None, EPS, NEXT))
    assert not operators.OF_MODELS["unit_norm"].run(x, None, None, EPS, 8.0, -1).requires_grad
