"""What is found in graphs beside plain norms: gates, groups of rows, norms along channels, and norms on both sides of a
residual sum. Each function is held against its graph with operators in place of what was found."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.fusion import find, rewrite
from support.traces import FULL, HIDDEN, as_tuple, full, given, recorded

pytestmark = pytest.mark.torch

EPS = 1e-5
HALF = torch.bfloat16


def normal(wide):
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def llama(x, w):
    return w * normal(x.float()).to(x.dtype)


def plain(x, w):
    return (w.float() * normal(x.float())).to(x.dtype)


def gemma(x, w):
    return (normal(x.float()) * (1.0 + w.float())).to(x.dtype)


def between(norm):
    def function(x, r, w):
        other = w * 2
        total = r + norm(x, w)
        return norm(total, other), total

    return function


def rounded_then_gate(x, r, w):
    return (llama(x, w) * F.silu(r.to(FULL))).to(x.dtype)


def gate_at_once(x, r, w):
    return (w.float() * normal(x.float()) * torch.sigmoid(r.float())).to(x.dtype)


def zero_centred_gate(x, r, w):
    return (normal(x.float()) * (1.0 + w.float()) * F.silu(r.float())).to(x.dtype)


def spelled(x, r, w):
    wide = r.float()
    return (normal(x.float()) * w.float() * (wide * torch.sigmoid(wide))).to(x.dtype)


def of_gated(x, r, w):
    return w * normal(x.float() * F.silu(r.float())).to(x.dtype)


def gated_groups(x, r, w):
    wide = x.float() * F.silu(r.float())
    return w * normal(wide.view(2, 3, 4, 16)).view(2, 3, HIDDEN).to(x.dtype)


def weighted_groups(x, r, w):
    wide = w.view(4, 16) * normal(x.float().view(2, 3, 4, 16))
    return (wide.view(2, 3, HIDDEN) * F.silu(r.float())).to(x.dtype)


def one_group(x, r, w):
    wide = x.float() * F.silu(r.float())
    return w * normal(wide.view(2, 3, 1, HIDDEN)).view(2, 3, HIDDEN).to(x.dtype)


FOUND = [
    (between(llama), "llama_rms_norm_add_norm"),
    (between(plain), "rms_norm_add_norm"),
    (between(gemma), "gemma_rms_norm_add_norm"),
    (rounded_then_gate, "llama_rms_norm_times_silu"),
    (gate_at_once, "rms_norm_times_sigmoid"),
    (zero_centred_gate, "gemma_rms_norm_times_silu"),
    (spelled, "rms_norm_times_silu"),
    (of_gated, "llama_rms_norm_of_gated"),
    (gated_groups, "llama_rms_norm_of_gated"),
    (weighted_groups, "rms_norm_times_silu"),
    (one_group, "llama_rms_norm_of_gated"),
]

LEFT = [
    # Of both sides of a sum: what the first norm makes is used elsewhere, or the norms round differently.
    (lambda x, r, w: (lambda y: (llama(r + y, w), y))(llama(x, w)), ["llama_rms_norm", "llama_add_rms_norm"]),
    (lambda x, r, w: plain(r + llama(x, w), w), ["llama_rms_norm", "add_rms_norm"]),
    # Of gates: rounded before the product, or of other extents. Norms in float32 remain.
    (lambda x, r, w: plain(x, w) * F.silu(r), ["rms_norm"]),
    (lambda x, r, w: (w.float() * normal(x.float()) * F.silu(r[:, :1].float())).to(x.dtype), ["rms_norm"]),
    # Groups that a row is not put together of again, and a product that is rounded.
    (lambda x, r, w: normal((x.float() * F.silu(r.float())).view(2, 3, 4, 16)).to(x.dtype), ["rms_norm"]),
    (lambda x, r, w: llama(x * F.silu(r), w), ["llama_rms_norm"]),
]


def held_against(function, tensors, names, how, dtype):
    graph, arguments = recorded(function, tensors, how)
    sites = find(graph)
    assert [s.serving.name for s in sites] == names
    assert rewrite(graph, sites) == sites
    called = [str(n.target) for n in graph.graph.nodes if "graphfuse" in str(n.target)]
    assert called == [f"graphfuse.{name}.default" for name in names]
    for got, want in zip(as_tuple(graph(*arguments)), as_tuple(function(*tensors)), strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=4e-6 if dtype is FULL else 0.01, atol=2e-6)
        assert dtype is FULL or (got != want).float().mean() < 0.01
    return sites


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize(("function", "name"), FOUND, ids=[name for _, name in FOUND])
def test_found(function, name, dtype, how):
    name = name if dtype is HALF else name.removeprefix("llama_")  # in float32 nothing is rounded in between
    held_against(function, given("xrw", dtype), [name], how, dtype)


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "names"), LEFT)
def test_left(function, names, how):
    held_against(function, given("xrw", HALF), names, how, HALF)


def wan(x, w, b=0.0, dim=1):
    return F.normalize(x, dim=dim) * x.shape[dim] ** 0.5 * w + b


def by_hand(x, w):
    length = torch.linalg.vector_norm(x, 2, dim=1, keepdim=True).clamp_min(1e-12)
    return x / length.expand_as(x) * 4.0 * w


def in_full(x, w):
    return F.normalize(x.float(), dim=1).to(x.dtype) * 4.0 * w


def video(dtype, layout):
    x = torch.randn(2, 16, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).contiguous(memory_format=layout)


def scales(dtype, *shape, seed=2):
    return torch.randn(16, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CHANNELS = [
    (lambda x, w: wan(x, w), "unit_norm"),
    (by_hand, "unit_norm"),
    (in_full, "unit_norm"),
    (lambda x, w: wan(x, w, w * 2), "unit_norm"),
    (lambda x, w: F.silu(wan(x, w)), "unit_norm_silu"),
    (lambda x, w: F.silu(in_full(x, w)), "unit_norm_silu"),
    (lambda x, w: F.silu(wan(x, w, w * 2)), "unit_norm_silu"),
]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize(("function", "name"), CHANNELS)
def test_norms_along_channels(function, name, dtype, layout, how):
    x, w = video(dtype, layout), scales(dtype, 1, 1, 1)
    rounded = dtype is HALF and function is not in_full and "in_full" not in function.__code__.co_names
    (site,) = held_against(function, (x, w), ["rounded_" * rounded + name], how, dtype)
    assert site.dim == -4 and site.factor == 4.0
    made = getattr(torch.ops.graphfuse, site.serving.name)(x, w.flatten(), None, 1e-12, 4.0, -4)
    assert made.stride() == x.stride()  # nothing is copied into another layout


def test_norms_along_channels_of_images_and_of_the_last_dimension():
    x = video(FULL, torch.contiguous_format)[:, :, 0]
    held_against(lambda x, w: wan(x, w), (x, scales(FULL, 1, 1)), ["unit_norm"], "aten", FULL)
    last = x.movedim(1, -1).contiguous()
    held_against(lambda x, w: wan(x, w, dim=-1), (last, scales(FULL)), ["unit_norm"], "aten", FULL)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.normalize(x, p=1, dim=1) * 4.0 * w,
        lambda x, w: F.normalize(x, dim=1),  # no operator has that alone
        lambda x, w: F.normalize(x, dim=(1, 2)) * 4.0 * w,
        lambda x, w: x / x.sum(1, keepdim=True).clamp_min(1e-12) * 4.0,
    ],
)
def test_what_is_no_norm_along_channels(function):
    graph, _ = recorded(function, (video(HALF, torch.contiguous_format), scales(HALF, 1, 1, 1)))
    assert find(graph) == []


def test_weights_along_another_dimension_are_left():
    x = torch.ones(2, 4, 4, 4, 4)
    (site,) = find(recorded(lambda x, w: wan(x, w), (x, torch.ones(4, 1, 1)))[0])
    assert site.form.weight == ""


@pytest.mark.parametrize("how", ["aten", "dynamo"])
def test_gradients_of_a_graph_that_was_rewritten(how):
    channels = video(FULL, torch.contiguous_format), scales(FULL, 1, 1, 1)
    for function, tensors, name in (
        (between(gemma), given("xrw", FULL), "gemma_rms_norm_add_norm"),
        (lambda x, w: F.silu(wan(x, w, w * 2)), channels, "unit_norm_silu"),
    ):
        tensors = [t.requires_grad_() for t in tensors]
        graph, arguments = recorded(function, tensors, how)
        rewrite(graph, sites := find(graph))
        assert [s.serving.name for s in sites] == [name]
        made, want = as_tuple(graph(*arguments)), as_tuple(function(*tensors))
        outer = [full.detach() * 2 for full in want]
        for a, b in zip(*(torch.autograd.grad(ys, tensors, outer) for ys in (made, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_the_second_weight_needs_is_made_first():
    def function(x, r, w):
        total = r + llama(x, w)
        return llama(total, w * total[0, 0]), total

    tensors = given("xrw", HALF)
    graph, arguments = recorded(function, tensors)
    made = rewrite(graph, find(graph))
    assert [s.serving.name for s in made] == ["llama_rms_norm", "llama_rms_norm"]
    assert all(map(torch.equal, graph(*arguments), function(*tensors)))


def test_rows_that_vary():
    function = torch.compile(
        lambda x, r, w: rounded_then_gate(x.flatten(0, 1), r.flatten(0, 1), w),
        backend="graphfuse",
        dynamic=True,
        options={"then": "aot_eager"},
    )
    for seed in (1, 2):
        tensors = full(HALF, seed)[:seed], full(HALF, seed + 2)[:seed], given("w", HALF)[0]
        assert torch.equal(function(*tensors), rounded_then_gate(*tensors).flatten(0, 1))
