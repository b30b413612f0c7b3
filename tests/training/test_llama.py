"""The norm that is rounded before it is multiplied by the weight, against torch's own operations in the same types."""

import pytest
import torch

from graphfuse import torch as training
from support.training_calls import passed, tensors

pytestmark = pytest.mark.torch

EPS = 1e-6
HALF = [torch.bfloat16, torch.float16]


def llama(x, weight):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def whole_squares(dtype, rows=64, columns=256):
    """Rows whose squares add up without rounding, so that in whatever order the norm is the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (rows, columns), generator=generator).to(dtype)
    weight = torch.randn(columns, generator=generator).to(dtype)
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_bits(dtype):
    x, weight = whole_squares(dtype)
    got = training.llama_rms_norm(x, weight, EPS)
    assert torch.equal(got, llama(x, weight))
    rounded_once = training.rms_norm(x, weight, EPS)
    assert torch.equal(got, rounded_once) == (dtype is torch.float32)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_bits_of_a_sum(dtype):
    x, weight = whole_squares(dtype)
    residual = x.detach().flip(0).requires_grad_()
    y, total = training.llama_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, llama(x + residual, weight))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_are_those_of_the_norm_that_is_rounded_once(dtype):
    x, weight = whole_squares(dtype)
    outer = torch.randn(x.shape).to(dtype)
    made = [
        torch.autograd.grad(f(x, weight, EPS), (x, weight), outer) for f in (training.llama_rms_norm, training.rms_norm)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    wide = exact[0] * torch.rsqrt(exact[0].pow(2).mean(-1, keepdim=True) + EPS) * exact[1]
    for got, want in zip(made[0], torch.autograd.grad(wide, exact, outer.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["llama_rms_norm", "llama_add_rms_norm"])
def test_kernels(name, kernels):
    x, weight = whole_squares(torch.bfloat16, 5, 64)
    given = (x, x.detach().flip(0), weight) if "add" in name else (x, weight)
    y = getattr(training, name)(*given, EPS)
    y, summed = (y[0], x + given[1]) if "add" in name else (y, x)
    assert torch.equal(y, llama(summed, weight))
    torch.autograd.grad(y.sum(), (x, weight))
    assert kernels[f"{name}_training"] == [True]
    assert kernels[f"{name}_backward"] == [True]


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    given = tensors("rms_norm", (4, 64), torch.bfloat16, grad=grad)
    passed(torch.ops.graphfuse.llama_rms_norm.default, (given["x"], given["weight"], EPS))
    given = tensors("add_rms_norm", (4, 64), torch.bfloat16, grad=grad)
    passed(torch.ops.graphfuse.llama_add_rms_norm.default, (given["x"], given["residual"], given["weight"], EPS))
