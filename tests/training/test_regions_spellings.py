"""Norms in every spelling, as regions: the ops that each becomes and where these round, and what is none.

Each function is recorded by make_fx and by Dynamo. The graph with an operator in its place is held against the function
itself, run by torch.
"""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import inductor
from graphfuse.torch.regions import selection
from support.traces import BELOW, FULL, HIDDEN, as_tuple, full, given, recorded

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


LLAMA, ONCE, ADDED = "rmsnorm:BFLOAT16 mul:BFLOAT16", "rmsnorm:BFLOAT16", "add:BFLOAT16"

FOUND = [
    (llama, "xw", HALF, LLAMA),
    (llama, "xw", FULL, "rmsnorm"),
    (once, "xw", HALF, ONCE),
    (once, "xW", HALF, ONCE),
    (gemma, "xw", HALF, f"add {ONCE}"),
    (by_power, "xw", HALF, ONCE),
    (by_root, "xw", HALF, ONCE),
    (by_reciprocal, "xw", HALF, ONCE),
    (half_times_full, "xw", HALF, LLAMA),
    (lambda x, w: F.rms_norm(x, (HIDDEN,), w, EPS), "xw", HALF, ONCE),
    (lambda x: F.rms_norm(x, (HIDDEN,), eps=EPS), "x", HALF, ONCE),
    (lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b, EPS), "xwb", HALF, "layernorm:BFLOAT16"),
    (lambda x, w: F.layer_norm(x, (HIDDEN,), w), "xw", HALF, "layernorm:BFLOAT16"),
    (centred, "xwb", HALF, "layernorm:BFLOAT16"),
    (by_variance, "xwb", FULL, "layernorm"),
    (by_both, "xwb", HALF, "layernorm:BFLOAT16"),
    (by_both, "xwb", FULL, "layernorm"),
    (lambda x, w, b: once(x, w) + b, "xwb", FULL, "rmsnorm"),
    (summed(llama), "xrw", HALF, f"{ADDED} {LLAMA}"),
    (summed(once), "xrw", HALF, f"{ADDED} {ONCE}"),
    (summed(gemma), "xrw", HALF, f"{ADDED} add {ONCE}"),
    (summed(lambda t, w: F.layer_norm(t, (HIDDEN,), w)), "xrw", HALF, f"{ADDED} layernorm:BFLOAT16"),
    (sandwich, "xrw", HALF, f"add {ONCE} {ADDED} {ONCE}"),
    (two_of_one_sum, "xrw", HALF, f"{ADDED} rmsnorm mul:BFLOAT16 identity:BFLOAT16 mul:BFLOAT16"),
    (lambda x, w: F.silu(once(x, w)), "xw", FULL, "rmsnorm swish"),
    (lambda x, w, r: (lambda y: y * torch.sigmoid(y) * r)(once(x, w)), "xwr", FULL, "rmsnorm sigmoid mul mul"),
    (adaptive, "xst", HALF, "layernorm add mul add:BFLOAT16"),
    (lambda x: F.normalize(x, dim=-1), "x", FULL, f"reduction {BELOW} binary_select div"),
    (lambda x: F.normalize(x, dim=-1), "x", HALF, f"reduction:BFLOAT16 {BELOW} binary_select:BFLOAT16 div:BFLOAT16"),
    (lambda x: torch.softmax(x, -1), "x", HALF, "softmax:BFLOAT16"),
    (heads, "xw", HALF, LLAMA),
    # Rounded before the activation.
    (lambda x, w: F.silu(once(x, w)), "xw", HALF, f"{ONCE} swish:BFLOAT16"),
    (
        lambda x, s, t: F.layer_norm(x, (HIDDEN,)) * (1 + s[:, None].to(x)) + t[:, None].to(x),
        "xst",
        HALF,
        "layernorm:BFLOAT16 identity:BFLOAT16 add:BFLOAT16 mul:BFLOAT16 identity:BFLOAT16 add:BFLOAT16",
    ),
    # A norm that is used without its weight, too.
    (lambda x, w: (lambda y: (y * w, y))(once(x, torch.ones(()))), "xw", FULL, "rmsnorm mul mul"),
    # The inverse root, and the squares, are rounded.
    (
        lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype),
        "x",
        HALF,
        "mul reduction add rsqrt identity:BFLOAT16 mul:BFLOAT16",
    ),
    (
        lambda x: (x.float() * torch.rsqrt(x.pow(2).float().mean(-1, keepdim=True) + EPS)).to(x.dtype),
        "x",
        HALF,
        "mul:BFLOAT16 reduction add rsqrt mul:BFLOAT16",
    ),
]

# What is another number: no norm is made of its steps.
NO_NORMS = [
    (lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 63 + EPS), "x"),
    (lambda x, r: r * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "xr"),
    (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), "x"),
    (lambda x: x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "x"),
    (lambda x: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / x, "x"),
    (lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + EPS).sqrt(), "x"),
    (by_corrected, "xwb"),
    (lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "x"),
    # Numbers of its steps that somebody else reads, who would have them computed once more.
    (lambda x: (x * (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)), r), "x"),
]


def ops(region):
    """Ops of a program, with the type that each rounds to."""
    return " ".join(step.op + f":{step.dtype}" * bool(step.dtype) for step in region.program.steps)


def replaced(function, tensors, how="dynamo"):
    """The regions of a function's graph, and functions of its arguments: that graph, and itself."""
    graph, arguments = recorded(function, tensors, how)
    verdicts, _ = selection.replace_in(graph, False)
    assert not any(why for _, why in verdicts), verdicts
    order = [next(i for i, t in enumerate(tensors) if t is a) for a in arguments]
    return graph, [region for region, _ in verdicts], lambda given: as_tuple(graph(*(given[i] for i in order)))


def alone(graph):
    """True if a graph has calls of one region, and views."""
    computed = [n for n in graph.graph.nodes if n.op.startswith("call") and n.all_input_nodes]
    called = [n for n in computed if not inductor.is_free(n)]
    return [n.target for n in called] == [torch.ops.graphfuse.region.default]


def are_close(made, wanted, dtype):
    for got, want in zip(made, wanted, strict=True):
        # In half precision the same value, but where the order of a sum moves it across the middle of two.
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got, want, rtol=4e-6 if dtype is FULL else 0.01, atol=2e-6)
        assert dtype is FULL or (got != want).float().mean() < 0.01


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "names", "dtype", "steps"), FOUND)
def test_found(function, names, dtype, steps, how):
    tensors = given(names, dtype)
    graph, (region,), call = replaced(function, tensors, how)
    assert ops(region) == steps
    assert alone(graph)
    are_close(call(tensors), as_tuple(function(*tensors)), dtype)


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "names"), NO_NORMS)
def test_what_is_none_keeps_its_steps(function, names, how):
    tensors = given(names, FULL)
    _, found, call = replaced(function, tensors, how)
    assert not any(step.op in ("rmsnorm", "layernorm") for region in found for step in region.program.steps)
    for got, want in zip(call(tensors), as_tuple(function(*tensors)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function", [lambda x: x.pow(2).mean((0, 2)), lambda x: x.pow(2).mean((0, 1)), lambda x: x.cumsum(-1)]
)
def test_what_is_no_region(function):
    tensors = given("x", HALF)
    _, found, call = replaced(function, tensors)
    assert not found
    assert torch.equal(call(tensors)[0], function(*tensors))


def test_gradients_of_a_graph_that_was_rewritten():
    tensors = [t.requires_grad_() for t in given("xrw", FULL)]
    _, _, call = replaced(summed(llama), tensors)
    outer = full(FULL, 9), full(FULL, 10)
    got = torch.autograd.grad(call(tensors), tensors, outer)
    want = torch.autograd.grad(summed(llama)(*tensors), tensors, outer)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["aten", "dynamo"])
def test_a_sum_that_is_needed_before_the_weight_is_made(how):
    """It is made before, and the norm of it behind."""

    def function(x, r, w):
        total = x + r
        return llama(total, total[0, 0] * w), total

    tensors = given("xrw", HALF)
    graph, (region,), call = replaced(function, tensors, how)
    assert ops(region) == f"mul:BFLOAT16 {LLAMA}"
    assert not any("rsqrt" in str(n.target) for n in graph.graph.nodes)
    assert all(map(torch.equal, call(tensors), function(*tensors)))


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
    _, found, call = replaced(function, given(names, HALF), how)
    assert function is changed_between or any("rmsnorm" in ops(region) for region in found)
    assert all(map(torch.equal, call(given(names, HALF)), as_tuple(function(*given(names, HALF)))))
