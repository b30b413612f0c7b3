"""Blocks of models under torch.compile with regions: values, and gradients against float64."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphfuse.torch import compile_report

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
B, T, C, HEADS = 2, 6, 32, 4


def attended(q, k, v, mask=None):
    """Attention as models write it out."""
    q, k, v = (t.view(B, -1, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * (C // HEADS) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores.float(), -1).to(q.dtype)
    return (weights @ v).transpose(1, 2).reshape(B, -1, C)


class Llama(nn.Module):
    """RMSNorm before attention and before a gated layer."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(C) + 0.5) for _ in range(2))
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(2 * C, C, bias=False)

    def norm(self, x, w):
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(attended(*self.qkv(self.norm(x, self.norms[0])).chunk(3, -1), mask))
        gate, up = self.up(F.gelu(self.norm(x, self.norms[1]))).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Bert(nn.Module):
    """Layer norm behind each sum, and a head that normalizes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.first, self.second = nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x):
        x = self.first(x + self.out(attended(*self.qkv(x).chunk(3, -1))))
        x = self.second(x + self.down(F.gelu(self.up(x))))
        return torch.tanh(F.normalize(x.float(), dim=-1)).to(x.dtype)


class Vit(nn.Module):
    """Layer norm with a scale and a shift of each sample."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.modulation = nn.Linear(C, 2 * C)

    def forward(self, x):
        scale, shift = self.modulation(F.silu(x.mean(1))).unsqueeze(1).chunk(2, -1)
        x = x + self.out(attended(*self.qkv(F.layer_norm(x, (C,)) * (1 + scale) + shift).chunk(3, -1)))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (C,))), approximate="tanh"))


def gradients(module, x):
    x = x.detach().clone().requires_grad_()
    out = module(x)
    parameters = dict(module.named_parameters())
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, [x, *parameters.values()], weights)
    return out.detach(), dict(zip(["x", *(n.removeprefix("_orig_mod.") for n in parameters)], grads, strict=True))


@functools.cache
def made(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


@pytest.mark.some(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "varying"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Llama, Bert, Vit])
def test_two_layers(kind, dtype, dynamic):
    model = copy.deepcopy(made(kind)).to(dtype)
    wide = copy.deepcopy(made(kind)).double()
    fast = torch.compile(model, backend="graphfuse", options={"then": "aot_eager"}, dynamic=dynamic)
    for tokens in (T, T + 3)[: 1 + dynamic]:
        x = torch.randn(B, tokens, C, generator=torch.Generator().manual_seed(tokens))
        own, got, exact = (gradients(m, x.to(t)) for m, t in ((model, dtype), (fast, dtype), (wide, torch.float64)))
        rounding = torch.finfo(dtype).eps
        for one, other, reference in (
            (got[0], own[0], exact[0]),
            *((got[1][n], own[1][n], exact[1][n]) for n in own[1]),
        ):
            allowed = 2 * (other - reference).norm() + 4 * rounding * reference.norm()
            assert (one - reference).norm() <= allowed
    assert sum(e.became == "region" for e in compile_report().replaced) >= 4


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", [Llama, Bert, Vit])
def test_checkpointed(kind):
    """Regions in the graphs that are called."""
    from torch.utils.checkpoint import checkpoint

    model = made(kind)
    function = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    x = torch.randn(B, T, C).requires_grad_()
    fast = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    want, got = (torch.autograd.grad(f(x).square().sum(), x) for f in (model, fast))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert any(e.became == "region" for e in compile_report().replaced)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", [Llama, Bert])
def test_under_autocast(kind):
    """What autocast computes otherwise is left, or as it computes it."""
    model, x = made(kind), torch.randn(B, T, C)
    fast = torch.compile(model, backend="graphfuse", options={"then": "aot_eager"})
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want, got = model(x), fast(x)
    assert want.dtype is got.dtype
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)
