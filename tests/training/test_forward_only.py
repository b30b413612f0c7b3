"""Operators without gradients: one kernel each, what they compute on it, and what torch asks of operators."""

import pytest
import torch
from torch.nn import functional as F

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


def test_opcheck():
    w = drawn(64, dtype=torch.float32)
    video = drawn(2, 16, 3, 4, dtype=torch.float32)
    for name, arguments in (
        ("unit_norm", (video, w[:16], None, 1e-12, 4.0, -3)),
        ("unit_norm_silu", (video, w[:16], w[:16], 1e-12, 4.0, -3)),
    ):
        operator = getattr(torch.ops.graphfuse, name).default
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_results_have_no_gradient():
    x = drawn(3, 64).requires_grad_()
    assert not operators.OF_MODELS["unit_norm"].run(x, None, None, EPS, 8.0, -1).requires_grad
