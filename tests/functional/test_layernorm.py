"""Layer norm and L2 normalization beyond what every function is asked: what may be left out, heads, zeros."""

import pytest
import torch

from graphfuse import VariantPackError, functional

EPS = 1e-5


def exact(x, weight=None, bias=None):
    x = x.double()
    apart = x - x.mean(-1, keepdim=True)
    y = apart / (apart.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("heads", [(), (3,)], ids=["one row of weights", "a row for each head"])
def test_weight_and_bias_may_be_left_out(heads, weighted, biased, device, plan_on):
    plan_on(device)
    shape = (*heads, 72) if weighted else (72,)
    x, residual = torch.randn(2, 5, 3, 72) + 9, torch.randn(5, 3, 72)
    given = {"weight": torch.randn(shape)} if weighted else {}
    given |= {"bias": torch.randn(shape)} if biased else {}
    for rows in x:
        made = functional.layernorm(rows, **given, eps=EPS)
        torch.testing.assert_close(made.double(), exact(rows, **given), rtol=1e-5, atol=1e-5)
    y, total = x[0].clone(), residual.clone()
    functional.fused_add_layernorm(y, total, **given, eps=EPS)
    torch.testing.assert_close(total, x[0] + residual)
    wanted = exact(x[0].double() + residual.double(), **given)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_bias_has_the_shape_of_the_weight():
    x = torch.randn(5, 3, 64)
    with pytest.raises(VariantPackError, match=r"bias has shape \(64,\); accepted: \(3, 64\)"):
        functional.layernorm(x, torch.ones(3, 64), torch.ones(64))
    with pytest.raises(VariantPackError, match=r"bias has shape \(3, 64\); accepted: \(64,\)"):
        functional.layernorm(x, None, torch.ones(3, 64))


def test_a_row_of_zeros_has_no_direction():
    x = torch.zeros(3, 64)
    x[1] = 2.0**-60  # whose length is beneath eps
    made = functional.normalize(x)
    assert not made[::2].any() and (made[1] == torch.tensor(2.0**-60) / 1e-12).all()
    assert torch.equal(made, torch.nn.functional.normalize(x, dim=-1))


def test_infinities_are_as_of_torch():
    x = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf] * 3, [0.0, torch.inf, 1.0], [torch.nan, 0.0, 1.0]])
    for name in ("softmax", "log_softmax"):
        made, wanted = getattr(functional, name)(x), getattr(torch, name)(x, -1)
        torch.testing.assert_close(made, wanted, equal_nan=True)
    torch.testing.assert_close(functional.logsumexp(x), torch.logsumexp(x, -1, keepdim=True), equal_nan=True)


def test_what_has_one_number_a_row_is_float32_unless_given():
    x = torch.randn(4, 3, 16).bfloat16()
    made = functional.logsumexp(x)
    assert made.shape == (4, 3, 1) and made.dtype is torch.float32
    out = torch.empty(4, 3, 1, dtype=torch.float16)
    assert functional.logsumexp(x, out) is out
    with pytest.raises(VariantPackError, match=r"out has shape \(4, 3\); accepted: \(4, 3, 1\)"):
        functional.logsumexp(x, torch.empty(4, 3))
