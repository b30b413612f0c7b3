"""Regions beside plain norms: gates, groups of rows, norms along channels, and norms on both sides of a residual sum.
Each function is held against its graph with one operator in its place."""

import pytest
import torch
from torch.nn import functional as F

from support.traces import FULL, HIDDEN, as_tuple, full, given
from training.test_regions_spellings import alone, are_close, ops, replaced

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


ROUNDED = "rmsnorm:BFLOAT16"
WEIGHTED = f"{ROUNDED} mul:BFLOAT16"

FOUND = [
    (between(llama), f"mul:BFLOAT16 {WEIGHTED} add:BFLOAT16 {WEIGHTED}"),
    (between(plain), f"mul:BFLOAT16 {ROUNDED} add:BFLOAT16 {ROUNDED}"),
    (between(gemma), f"mul:BFLOAT16 add {ROUNDED} add:BFLOAT16 add {ROUNDED}"),
    (rounded_then_gate, f"{WEIGHTED} swish mul:BFLOAT16"),
    (gate_at_once, "rmsnorm sigmoid mul:BFLOAT16"),
    (zero_centred_gate, "add rmsnorm swish mul:BFLOAT16"),
    (spelled, "rmsnorm sigmoid mul mul:BFLOAT16"),
    (of_gated, f"swish mul {WEIGHTED}"),
    (gated_groups, f"swish mul {WEIGHTED}"),
    (weighted_groups, "rmsnorm mul swish mul:BFLOAT16"),
    (one_group, f"swish mul {WEIGHTED}"),
    # What the first norm makes is used elsewhere, or the norms round differently.
    (
        lambda x, r, w: (lambda y: (llama(r + y, w), y))(llama(x, w)),
        f"{WEIGHTED} add:BFLOAT16 {WEIGHTED}",
    ),
    (lambda x, r, w: plain(r + llama(x, w), w), f"{WEIGHTED} add:BFLOAT16 {ROUNDED}"),
    # Gates that are rounded before the product, or of other extents.
    (lambda x, r, w: plain(x, w) * F.silu(r), f"{ROUNDED} swish:BFLOAT16 mul:BFLOAT16"),
    (
        lambda x, r, w: (w.float() * normal(x.float()) * F.silu(r[:, :1].float())).to(x.dtype),
        "rmsnorm swish mul:BFLOAT16",
    ),
    # Groups that a row is not put together of again, and a product that is rounded.
    (
        lambda x, r, w: normal((x.float() * F.silu(r.float())).view(2, 3, 4, 16)).to(x.dtype),
        f"swish mul {ROUNDED}",
    ),
    (lambda x, r, w: llama(x * F.silu(r), w), f"swish:BFLOAT16 mul:BFLOAT16 {WEIGHTED}"),
]


def held_against(function, tensors, steps, how, dtype):
    graph, (region,), call = replaced(function, tensors, how)
    assert ops(region) == steps
    assert alone(graph)
    are_close(call(tensors), as_tuple(function(*tensors)), dtype)
    return region


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "steps"), FOUND)
def test_found(function, steps, how):
    held_against(function, given("xrw", HALF), steps, how, HALF)


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("function", [function for function, _ in FOUND])
def test_found_in_float32(function, how):
    graph, (region,), call = replaced(function, tensors := given("xrw", FULL), how)
    assert alone(graph) and "BFLOAT16" not in ops(region)
    are_close(call(tensors), as_tuple(function(*tensors)), FULL)


def wan(x, w, b=0.0, dim=1):
    return F.normalize(x, dim=dim) * x.shape[dim] ** 0.5 * w + b


def by_hand(x, w):
    length = torch.linalg.vector_norm(x, 2, dim=1, keepdim=True).clamp_min(1e-12)
    return x / length.expand_as(x) * 4.0 * w


def in_full(x, w):
    return F.normalize(x.float(), dim=1).to(x.dtype) * 4.0 * w


def rms_along(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPS)).to(x.dtype) * w


def video(dtype, layout):
    x = torch.randn(2, 16, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).contiguous(memory_format=layout)


def scales(dtype, *shape, seed=2):
    return torch.randn(16, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CHANNELS = [
    lambda x, w: wan(x, w),
    by_hand,
    in_full,
    lambda x, w: wan(x, w, w * 2),
    lambda x, w: F.silu(wan(x, w)),
    lambda x, w: F.silu(in_full(x, w)),
    lambda x, w: F.silu(wan(x, w, w * 2)),
    # Of another length, of none of it, and without a weight.
    lambda x, w: F.normalize(x, p=1, dim=1) * 4.0 * w,
    lambda x, w: x / x.abs().sum(1, keepdim=True).clamp_min(1e-12) * 4.0,
    lambda x, w: F.normalize(x, dim=1),
    rms_along,
]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("function", CHANNELS)
def test_norms_along_channels(function, dtype, layout, how):
    """Nothing is copied into another layout."""
    tensors = video(dtype, layout), scales(dtype, 1, 1, 1)
    graph, (region,), call = replaced(function, tensors, how)
    assert alone(graph) and region.orders[0] == (0, 2, 3, 4, 1)
    are_close(call(tensors), as_tuple(function(*tensors)), dtype)


def test_norms_along_channels_of_images_and_of_the_last_dimension():
    x = video(FULL, torch.contiguous_format)[:, :, 0]
    last = x.movedim(1, -1).contiguous()
    for function, tensors in (
        (lambda x, w: wan(x, w), (x, scales(FULL, 1, 1))),
        (lambda x, w: wan(x, w, dim=-1), (last, scales(FULL))),
    ):
        graph, _, call = replaced(function, tensors, "aten")
        assert alone(graph)
        are_close(call(tensors), as_tuple(function(*tensors)), FULL)


def test_lengths_over_two_dimensions_are_none():
    tensors = video(HALF, torch.contiguous_format), scales(HALF, 1, 1, 1)
    _, found, call = replaced(lambda x, w: F.normalize(x, dim=(1, 2)) * 4.0 * w, tensors)
    assert not found
    assert torch.equal(call(tensors)[0], F.normalize(tensors[0], dim=(1, 2)) * 4.0 * tensors[1])


def test_weights_along_another_dimension():
    tensors = video(FULL, torch.contiguous_format), torch.randn(3, 1, 1)
    graph, (region,), call = replaced(lambda x, w: wan(x, w), tensors)
    assert alone(graph) and [one.axes for one in region.program.inputs] == ["nnnnn", "-n11-"]
    are_close(call(tensors), as_tuple(wan(*tensors)), FULL)


def test_rows_that_are_too_short_along_channels_are_left():
    """No kernel has them, whatever they are multiplied by."""
    tensors = torch.randn(2, 4, 4, 4, 4), torch.randn(4, 1, 1)
    _, found, call = replaced(lambda x, w: wan(x, w), tensors)
    assert not found
    assert torch.equal(call(tensors)[0], wan(*tensors))


@pytest.mark.parametrize("how", ["aten", "dynamo"])
def test_gradients_of_a_graph_that_was_rewritten(how):
    channels = video(FULL, torch.channels_last_3d), scales(FULL, 1, 1, 1)
    for function, tensors in (
        (between(gemma), given("xrw", FULL)),
        (gated_groups, given("xrw", FULL)),
        (weighted_groups, given("xrw", FULL)),
        (lambda x, w: F.silu(wan(x, w, w * 2)), channels),
    ):
        tensors = [t.requires_grad_() for t in tensors]
        _, found, call = replaced(function, tensors, how)
        assert len(found) == 1
        made, want = call(tensors), as_tuple(function(*tensors))
        outer = [full.detach() * 2 for full in want]
        for a, b in zip(*(torch.autograd.grad(ys, tensors, outer) for ys in (made, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


KERNELS = [
    (rounded_then_gate, lambda: given("xrw", HALF)),
    (of_gated, lambda: given("xrw", HALF)),
    (lambda x, r, w, b: (lambda total: (llama(total, b), total))(r + llama(x, w)), lambda: given("xrwb", HALF)),
    (lambda x, w: F.silu(wan(x, w)), lambda: (video(HALF, torch.channels_last_3d), scales(HALF, 1, 1, 1))),
]


@pytest.mark.emulate
@pytest.mark.parametrize(("function", "tensors"), KERNELS)
def test_one_kernel_each_way_on_the_emulator(function, tensors, kernels):
    tensors = [t.requires_grad_() for t in tensors()]
    _, found, call = replaced(function, tensors)
    assert len(found) == 1
    made, want = call(tensors), as_tuple(function(*tensors))
    outer = [torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(HALF) for y in want]
    for a, b in zip(*((*ys, *torch.autograd.grad(ys, tensors, outer)) for ys in (made, want)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    assert kernels == {"region_training": [True], "region_backward": [True]}


def test_what_the_second_weight_needs_is_made_first():
    def function(x, r, w):
        total = r + llama(x, w)
        return llama(total, w * total[0, 0]), total

    tensors = given("xrw", HALF)
    _, found, call = replaced(function, tensors)
    assert [ops(region) for region in found] == [f"{WEIGHTED} add:BFLOAT16", f"mul:BFLOAT16 {WEIGHTED}"]
    assert all(map(torch.equal, call(tensors), function(*tensors)))


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
