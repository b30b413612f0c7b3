"""What is found in graphs: norms in every spelling, what stands around them, and what rounds where no operator does.

Each function is recorded by make_fx and by Dynamo. The graph with operators in place of what was found is held against
the function itself, run by torch.
"""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.fusion import find, rewrite
from support.traces import FULL, HIDDEN, as_tuple, full, given, recorded

pytestmark = pytest.mark.torch

EPS = 1e-5
HALF = torch.bfloat16


def llama(x, w):
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def once(x, w):
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def gemma(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).type_as(x)


def by_power(x, w):
    wide = x.float()
    return (wide * torch.pow(EPS + (wide * wide).mean(dim=-1, keepdim=True), -0.5) * w).type_as(x)


def by_root(x, w):
    wide = x.float()
    return (wide / torch.sqrt(wide.pow(2).sum(-1, keepdim=True) / HIDDEN + EPS) * w.float()).to(x.dtype)


def by_reciprocal(x, w):
    wide = x.float()
    root = (wide.pow(2).mean(-1) + EPS).sqrt().unsqueeze(-1)
    return (root.reciprocal() * wide * w.view(1, 1, -1)).to(x.dtype)


def half_times_full(x, w):
    return w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)).to(w.dtype)


def centred(x, w, b):
    wide = x.float()
    apart = wide - wide.mean(-1, keepdim=True)
    return (apart * torch.rsqrt(apart.pow(2).mean(-1, keepdim=True) + EPS) * w.float() + b.float()).to(x.dtype)


def by_variance(x, w, b):
    apart = x - x.mean(-1, keepdim=True)
    return apart / (x.var(-1, keepdim=True, unbiased=False) + EPS).sqrt() * w + b


def by_both(x, w, b):
    """As inductor writes torch's layer norm."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, [-1], correction=0, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + EPS) * w + b).to(x.dtype)


def by_corrected(x, w, b):
    """Of one less than all elements, as torch.var has it by itself."""
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + EPS) * w + b


def summed(norm):
    def function(x, r, w):
        total = r + x
        return norm(total, w), total

    return function


def sandwich(x, r, w):
    total = gemma(x, w) + r
    return gemma(total, w), total


def two_of_one_sum(x, r, w):
    total = x + r
    return once(total, w), llama(total, w), total


def adaptive(x, scale, shift):
    y = F.layer_norm(x.float(), (HIDDEN,), eps=EPS)
    return (y * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


def heads(x, w):
    return llama(x.view(2, 3, 4, 16), w[:16]).transpose(1, 2)


FOUND = [
    (llama, "xw", HALF, ["llama_rms_norm"]),
    (llama, "xw", FULL, ["rms_norm"]),
    (once, "xw", HALF, ["rms_norm"]),
    (once, "xW", HALF, ["rms_norm"]),
    (gemma, "xw", HALF, ["gemma_rms_norm"]),
    (by_power, "xw", HALF, ["rms_norm"]),
    (by_root, "xw", HALF, ["rms_norm"]),
    (by_reciprocal, "xw", HALF, ["rms_norm"]),
    (half_times_full, "xw", HALF, ["llama_rms_norm"]),
    (lambda x, w: F.rms_norm(x, (HIDDEN,), w, EPS), "xw", HALF, ["rms_norm"]),
    (lambda x: F.rms_norm(x, (HIDDEN,), eps=EPS), "x", HALF, ["rms_norm"]),
    (lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b, EPS), "xwb", HALF, ["layer_norm_bias"]),
    (lambda x, w: F.layer_norm(x, (HIDDEN,), w), "xw", HALF, ["layer_norm"]),
    (centred, "xwb", HALF, ["layer_norm_bias"]),
    (by_variance, "xwb", FULL, ["layer_norm_bias"]),
    (by_both, "xwb", HALF, ["layer_norm_bias"]),
    (by_both, "xwb", FULL, ["layer_norm_bias"]),
    (lambda x, w, b: once(x, w) + b, "xwb", FULL, ["rms_norm_bias"]),
    (summed(llama), "xrw", HALF, ["llama_add_rms_norm"]),
    (summed(once), "xrw", HALF, ["add_rms_norm"]),
    (summed(gemma), "xrw", HALF, ["gemma_add_rms_norm"]),
    (summed(lambda t, w: F.layer_norm(t, (HIDDEN,), w)), "xrw", HALF, ["add_layer_norm"]),
    (sandwich, "xrw", HALF, ["gemma_rms_norm_add_norm"]),
    (two_of_one_sum, "xrw", HALF, ["add_rms_norm", "llama_rms_norm"]),
    (lambda x, w: F.silu(once(x, w)), "xw", FULL, ["rms_norm_silu"]),
    (lambda x, w, r: (lambda y: y * torch.sigmoid(y) * r)(once(x, w)), "xwr", FULL, ["rms_norm_silu_gate"]),
    (adaptive, "xst", HALF, ["ada_layer_norm"]),
    (lambda x: F.normalize(x, dim=-1), "x", FULL, ["differentiable_normalize"]),
    (heads, "xw", HALF, ["llama_rms_norm"]),
    # Rounded before the activation: the norm alone.
    (lambda x, w: F.silu(once(x, w)), "xw", HALF, ["rms_norm"]),
    (
        lambda x, s, t: F.layer_norm(x, (HIDDEN,)) * (1 + s[:, None].to(x)) + t[:, None].to(x),
        "xst",
        HALF,
        ["layer_norm"],
    ),
    # A norm that is used without its weight, too.
    (lambda x, w: (lambda y: (y * w, y))(once(x, torch.ones(()))), "xw", FULL, ["rms_norm"]),
]

NOT_FOUND = [
    # What rounds where no operator does.
    (lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype), "x", HALF),
    (lambda x: (x.float() * torch.rsqrt(x.pow(2).float().mean(-1, keepdim=True) + EPS)).to(x.dtype), "x", HALF),
    (lambda x: F.normalize(x, dim=-1), "x", HALF),
    # What is another number.
    (lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS), "x", FULL),
    (lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 63 + EPS), "x", FULL),
    (lambda x, r: r * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "xr", FULL),
    (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), "x", FULL),
    (lambda x: x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "x", FULL),
    (lambda x: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / x, "x", FULL),
    (lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + EPS).sqrt(), "x", FULL),
    (by_corrected, "xwb", FULL),
    (lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "x", FULL),
    (lambda x: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), EPS, alpha=2)), "x", FULL),
    (lambda x: F.layer_norm(x, (3, HIDDEN)), "x", HALF),
    (lambda x: torch.softmax(x, -1), "x", HALF),
]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "names", "dtype", "operators"), FOUND)
def test_found(function, names, dtype, operators, how):
    tensors = given(names, dtype)
    graph, arguments = recorded(function, tensors, how)
    sites = find(graph)
    assert [s.serving.name for s in sites] == operators
    assert len(rewrite(graph, sites)) == len(sites)
    called = [str(n.target) for n in graph.graph.nodes if "graphfuse" in str(n.target)]
    assert called == [f"graphfuse.{name}.default" for name in operators]
    assert not any("rsqrt" in str(n.target) for n in graph.graph.nodes)
    for got, want in zip(as_tuple(graph(*arguments)), as_tuple(function(*tensors)), strict=True):
        # In half precision the same value, but where the order of a sum moves it across the middle of two.
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=2e-6 if dtype is FULL else 0.01, atol=1e-6)
        assert dtype is FULL or (got != want).float().mean() < 0.01


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "names", "dtype"), NOT_FOUND)
def test_not_found(function, names, dtype, how):
    graph, _ = recorded(function, given(names, dtype), how)
    assert find(graph) == []


def test_gradients_of_a_graph_that_was_rewritten():
    tensors = [t.requires_grad_() for t in given("xrw", FULL)]
    graph, arguments = recorded(summed(llama), tensors, "dynamo")
    rewrite(graph, find(graph))
    outer = full(FULL, 9), full(FULL, 10)
    got = torch.autograd.grad(as_tuple(graph(*arguments)), tensors, outer)
    want = torch.autograd.grad(summed(llama)(*tensors), tensors, outer)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["aten", "dynamo"])
def test_a_sum_that_is_needed_before_the_weight_is_made(how):
    def function(x, r, w):
        total = x + r
        return llama(total, total[0, 0] * w), total

    tensors = given("xrw", HALF)
    graph, arguments = recorded(function, tensors, how)
    sites = find(graph)
    assert [s.serving.name for s in sites] == ["llama_add_rms_norm"]
    assert [s.serving.name for s in rewrite(graph, sites)] == ["llama_rms_norm"]
    assert all(map(torch.equal, graph(*arguments), function(*tensors)))


def changed_copy(x, w):
    y = x.clone()
    z = llama(y, w)
    y.add_(1)
    return z + y


def changed_later(x, w):
    z = llama(x, w)
    x.add_(1)
    return z, x


def changed_between(x, r, w):
    total = x + r
    wide = total.float()
    total.mul_(2)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(total.dtype), total


def changed_by_a_transpose(x, w):
    y = x.clone()
    z = llama(y, w)
    y.transpose(0, 1).mul_(2)
    return z + y


def changed_by_an_index(x, r, w):
    total = x + r
    total[:, 0] = 1
    return llama(total, w), total


def changed_through_a_part(x, r, w):
    total = x + r
    total.select(-1, 0).fill_(1)
    total.chunk(2, -1)[1].mul_(3)
    return llama(total, w), total


def changed_by_a_function(x, w):
    y = x.clone()
    z = llama(y, w)
    return z, torch.nn.functional.relu(y, inplace=True)


CHANGED = [
    (changed_copy, "xw"),
    (changed_later, "xw"),
    (changed_between, "xrw"),
    (changed_by_a_transpose, "xw"),
    (changed_by_an_index, "xrw"),
    (changed_through_a_part, "xrw"),
    (changed_by_a_function, "xw"),
]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "names"), CHANGED)
def test_what_is_changed_in_place_is_read_before(function, names, how):
    tensors = given(names, HALF)
    graph, arguments = recorded(function, tensors, how)
    order = [next(i for i, t in enumerate(tensors) if t is a) for a in arguments]
    rewrite(graph, find(graph))
    fresh = given(names, HALF)
    want = as_tuple(function(*given(names, HALF)))
    assert all(map(torch.equal, as_tuple(graph(*(fresh[i] for i in order))), want))
