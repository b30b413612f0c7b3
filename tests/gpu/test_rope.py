"""Queries and keys, normalized, rotated and stored, on the GPU: values and gradients against float64."""

import pytest
import torch

from graphfuse import functional
from graphfuse.torch import qk_norm_rope, qk_norm_rope_across_heads
from support import oracle

pytestmark = pytest.mark.gpu

EPS = 1e-6
DEVICE = "cuda"


def drawn(tokens, queries, keys, columns, rotary, dtype):
    source = torch.Generator(DEVICE).manual_seed(tokens + columns)

    def random(*shape):
        return torch.randn(*shape, generator=source, device=DEVICE)

    packed, weights = random(tokens, queries + 2 * keys, columns).to(dtype), random(2, columns).to(dtype)
    q, k, v = packed.split((queries, keys, keys), 1)
    positions = torch.randint(4096, (tokens,), generator=source, device=DEVICE)
    return q, k, v, *weights, random(4096, rotary), positions


def exact(q, k, q_weight, k_weight, cache, positions, is_neox, across=False):
    cos, sin = cache.double()[positions][:, None].chunk(2, -1)
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        weight = weight.view(x.shape[1:]) if across else weight
        y = x * (x.square().mean((-2, -1) if across else -1, keepdim=True) + EPS).rsqrt() * weight
        made.append(oracle.rotated(y, *(t.expand(*y.shape[:-1], -1) for t in (cos, sin)), not is_neox))
    return made


KINDS = [
    (1, 32, 8, 128, 128, torch.bfloat16),
    (17, 32, 8, 128, 128, torch.bfloat16),
    (4099, 32, 8, 128, 128, torch.bfloat16),
    (1000, 5, 1, 64, 32, torch.float16),
    (1000, 16, 4, 256, 256, torch.bfloat16),
    (1000, 4, 4, 128, 64, torch.float32),
    (300, 3, 2, 512, 512, torch.bfloat16),
]


@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_and_gradients(kind, is_neox):
    q, k, _, *weights, cache, positions = drawn(*kind)
    check(qk_norm_rope, (q, k, *weights), (cache, positions), is_neox)


ACROSS = [
    (1, 12, 12, 128, 128, torch.bfloat16),
    (4099, 12, 12, 128, 128, torch.bfloat16),
    (1000, 40, 40, 128, 128, torch.bfloat16),
    (1000, 5, 2, 64, 32, torch.float16),
    (300, 8, 8, 256, 128, torch.float32),
]


@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("kind", ACROSS, ids=str)
def test_values_and_gradients_across_heads(kind, is_neox):
    q, k, _, *_, cache, positions = drawn(*kind)
    weights = (torch.randn(x.shape[1] * x.shape[2], device=DEVICE).to(x.dtype) for x in (q, k))
    check(qk_norm_rope_across_heads, (q, k, *weights), (cache, positions), is_neox, across=True)


def check(function, given, angles, is_neox, **kind):
    cache, positions = angles
    leaves = [t.detach().requires_grad_() for t in given]
    made = function(*leaves, cache, positions, EPS, is_neox)
    outer = [torch.randn_like(y) for y in made]
    found = torch.autograd.grad(made, leaves, outer, retain_graph=True)
    again = torch.autograd.grad(made, leaves, outer)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = exact(*wide, cache, positions, is_neox, **kind)
    gradients = torch.autograd.grad(want, wide, [t.double() for t in outer])
    unit = torch.finfo(given[0].dtype).eps
    for a, b in zip((*made, *found), (*want, *gradients), strict=True):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


def test_compiled_forward_and_backward():
    q, k, _, *weights, cache, positions = drawn(64, 8, 2, 128, 128, torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (q, k, *weights)]

    def around(*given):
        return [y * 2 for y in qk_norm_rope(*given, cache, positions, EPS)]

    fast = torch.compile(around, fullgraph=True)
    made, want = fast(*leaves), around(*leaves)
    outer = [torch.randn_like(y) for y in want]
    got, exact = (torch.autograd.grad(ys, leaves, outer) for ys in (made, want))
    assert all(torch.equal(a, b) for a, b in zip((*made, *got), (*want, *exact), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 4099])
def test_a_paged_cache(tokens, dtype):
    q, k, v, *weights, cache, positions = drawn(tokens, 32, 8, 128, 128, torch.bfloat16)
    pages = tokens // 8 + 2
    k_cache, v_cache = torch.zeros(2, pages, 16, 8, 128, device=DEVICE).to(dtype)
    slots = torch.randperm(pages * 16, device=DEVICE)[:tokens]
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.tensor([0.05], device=DEVICE))
    arguments = q, k, v, *weights, cache, positions, k_cache, v_cache, slots, EPS
    q_out = functional.qk_norm_rope_cache(*arguments, **(scales if dtype is torch.float8_e4m3fn else {}))
    want_q, want_k = exact(*(t.double() for t in (q, k, *weights)), cache, positions, True)
    torch.testing.assert_close(q_out.double(), want_q, rtol=2**-7, atol=1e-5)
    scale, unit, largest = (0.05, 2**-3, 448) if dtype is torch.float8_e4m3fn else (1.0, 2**-7, 1e9)
    for found, values in ((k_cache, want_k), (v_cache, v.double())):
        stored = found.flatten(0, 1).double()[slots]
        torch.testing.assert_close(stored, (values / scale).clamp(-largest, largest), rtol=0.51 * unit, atol=2**-9)
        assert int(found.flatten(0, 1).double().abs().sum((1, 2)).count_nonzero()) == tokens
