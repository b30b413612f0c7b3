"""Parts of rows that are reduced beside the rows, in torch: one region, which computes what eager mode does, and what
is left with a reason."""

import logging

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import cost
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.regions import selection
from support.regions import FULL, HALF, rows
from support.regions import found as regions_of
from support.traces import as_tuple, recorded

pytestmark = pytest.mark.torch

FP8, LARGEST = torch.float8_e4m3fn, 448.0
C = 512


def norm(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def by_unflatten(y, part=128):
    parts = y.float().unflatten(-1, (-1, part))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST
    return (parts / scale).clamp(-LARGEST, LARGEST).to(FP8).flatten(-2), scale.squeeze(-1)


def by_view(y):
    parts = y.view(*y.shape[:-1], -1, 128).float()
    scale = (parts.abs().max(-1, keepdim=True)[0] / LARGEST).clamp_min(1e-12)
    return (parts / scale).to(FP8).view(y.shape), scale


def by_reshape(y):
    """Times the inverse of scales, whose last dimension is dropped."""
    parts = y.reshape(*y.shape[:-1], y.shape[-1] // 64, 64)
    scale = torch.clamp(parts.abs().amax(dim=-1).float(), min=1e-4) * (1 / LARGEST)
    values = torch.clamp(parts * scale.reciprocal()[..., None], min=-LARGEST, max=LARGEST)
    return values.to(FP8).reshape(y.shape), scale


def by_groups(y):
    """As vLLM has it: parts of all rows along one dimension."""
    parts = y.reshape(y.numel() // 128, 128)
    scale = parts.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-10).to(FULL) / LARGEST
    values = (parts / scale).clamp(min=-LARGEST, max=LARGEST).to(FP8)
    return values.reshape(y.shape), scale.reshape(y.shape[:-1] + (y.shape[-1] // 128,))


def by_flat_view(y):
    parts = y.float().view(-1, 128)
    scale = parts.abs().amax(dim=-1) / LARGEST
    return (parts / scale.unsqueeze(-1)).to(FP8).view(*y.shape), scale.view(*y.shape[:-1], -1)


SPELLINGS = [by_unflatten, by_view, by_reshape, by_groups, by_flat_view]


def given(*shape, columns=C):
    """Rows of powers of two, whose norm sums up without rounding, one row of zeros among them, and a weight."""
    generator = torch.Generator().manual_seed(0)
    sizes, signs = (torch.randint(-2, 3, (*shape, columns), generator=generator) for _ in range(2))
    x = torch.where(signs < 0, -1.0, 1.0) * torch.exp2(sizes)
    x.view(-1, columns)[1] = 0
    return x.to(HALF), rows(HALF, 1, (columns,))


def check(function, tensors, how="dynamo", error=0.0):
    """That a function is one region, which computes what eager mode does but for a relative error; the region."""
    module, inputs, verdicts = regions_of(function, *tensors, how=how)
    assert [why for _, why in verdicts] == [""]
    for one, other in zip(as_tuple(module(*inputs)), as_tuple(function(*tensors)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(one.float(), other.float(), rtol=error, atol=error / 1000, equal_nan=True)
    return verdicts[0][0]


@pytest.fixture
def kernel(kernels):
    """That each program is one kernel on the emulator."""
    yield
    assert kernels and all(parts == [True] for parts in kernels.values())


@pytest.mark.parametrize("how", ["dynamo", "aten"])
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("blocks", SPELLINGS)
def test_spellings(blocks, shape, how, kernel):
    region = check(lambda x, w: blocks(norm(x, w)), given(*shape), how=how)
    assert {step.part for step in region.program.steps} == {0, 64 if blocks is by_reshape else 128}


@pytest.mark.parametrize("part", [8, 16, 32, 64, 128, 256, 512, 1024])
def test_lengths(part, kernel):
    check(lambda x, w: by_unflatten(norm(x, w), part), given(3, columns=2048))


def test_what_is_no_number(kernel):
    """A row of NaN, one with an infinity, one of zeros, without limits in the way."""
    x, w = given(4)
    x[2, 5], x[3, 200] = float("nan"), float("inf")
    check(lambda x, w: by_unflatten(norm(x, w)), (x, w))

    def unlimited(x, w):
        parts = norm(x, w).float().unflatten(-1, (-1, 128))
        scale = parts.abs().amax(-1, keepdim=True) / LARGEST
        return (parts / scale).to(FP8), scale

    check(unlimited, (x, w))


def residual(x, w):
    """The sum and its norm are written, too."""
    total = x + x.flip(0)
    y = norm(total, w)
    return *by_unflatten(y), total, y


def of_layer_norm(x, w):
    return by_unflatten(F.layer_norm(x, (C,), w))


def of_fused_norm(x, w):
    return by_unflatten(F.rms_norm(x, (C,), w, 1e-5))


def of_softmax(x, w):
    return by_unflatten(torch.softmax(x.float(), -1).to(HALF))


def before(x, w):
    """Parts first, whole rows behind."""
    parts = x.view(*x.shape[:-1], -1, 64).float()
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return norm((parts / largest).to(x.dtype).view(x.shape), w), largest


def weighted(x, w):
    """The weight is viewed as parts like the rows."""
    parts = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).unflatten(-1, (-1, 128))
    parts = parts * w.unflatten(-1, (-1, 128))
    return parts / parts.abs().amax(-1, keepdim=True).clamp(min=1e-4)


@pytest.mark.parametrize(
    "function", [residual, of_layer_norm, of_fused_norm, of_softmax, before, weighted], ids=lambda f: f.__name__
)
def test_what_stands_around(function, kernel):
    rounded = {of_layer_norm: 2**-3, of_softmax: 2**-3, weighted: 1e-5}
    check(function, given(4), error=rounded.get(function, 0.0))


def heads(x, w):
    parts = norm(x, w).unflatten(-1, (-1, 64)).float()
    return (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def several(x, w):
    parts = norm(x, w).unflatten(-1, (-1, 32)).float()
    return parts.sum(-1), parts.mean(-1, keepdim=True), parts.amin(-1), parts.logsumexp(-1), parts.std(-1)


def likely(x, w):
    return torch.softmax(norm(x, w).unflatten(-1, (-1, 32)).float(), -1).flatten(-2)


def unit(x, w):
    return norm(F.normalize(norm(x, w).unflatten(-1, (-1, 64)).float(), dim=-1).flatten(-2).to(x.dtype), w)


@pytest.mark.parametrize("function", [heads, several, likely, unit], ids=lambda f: f.__name__)
def test_other_reductions_of_parts(function, kernel):
    check(function, given(4), error=0.01 if function in (heads, unit) else 1e-5)


def cast(x, w, v):
    """A cast of parts that is a cast of rows."""
    wide = x.float()
    parts = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).unflatten(-1, (-1, 64)).to(x.dtype)
    return parts, parts.abs().amax(-1)


def by(other):
    """A norm in parts times something."""

    def function(x, w, v):
        parts = norm(x, w).unflatten(-1, (-1, 64)) * other(x, w, v)
        return parts, parts.abs().amax(-1)

    return function


BESIDE = {
    "a cast": (cast, ["rmsnorm, abs, reduction"]),
    "rows as parts": (by(lambda x, w, v: x.unflatten(-1, (-1, 64))), ["rmsnorm, mul, abs, reduction"]),
    "a vector as parts": (by(lambda x, w, v: w.unflatten(-1, (-1, 64))), ["rmsnorm, mul, abs, reduction"]),
    "parts that are made before": (
        by(lambda x, w, v: x.flip(0).unflatten(-1, (-1, 64)).contiguous()),
        ["rmsnorm, mul, abs, reduction"],
    ),
    # What has no kernel with parts of rows: it is behind the region, or before another.
    "columns of parts": (by(lambda x, w, v: v[0]), ["rmsnorm, mul", "mul, abs, reduction"]),
    "parts of all rows": (by(lambda x, w, v: v), ["rmsnorm, mul", "mul, abs, reduction"]),
}


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", BESIDE)
def test_what_parts_are_computed_with(name, shape, kernel):
    (function, regions), (x, w) = BESIDE[name], given(*shape)
    module, inputs, verdicts = regions_of(function, x, w, rows(HALF, 2, (C // 64, 64)))
    assert [(region.program.operations, why) for region, why in verdicts] == [(region, "") for region in regions]
    for one, other in zip(module(*inputs), function(x, w, rows(HALF, 2, (C // 64, 64))), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("blocks", SPELLINGS)
def test_rows_of_any_number(blocks, kernel, nothing_compiled):
    function = torch.compile(
        lambda x, w: blocks(norm(x, w)), backend="graphfuse", options={"then": "aot_eager"}, dynamic=True
    )
    for count in (4, 7, 130):
        tensors = given(2, count)
        for one, other in zip(function(*tensors), blocks(norm(*tensors)), strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    (graph,) = compiled_graphs.compile_report().graphs
    assert {entry.became for entry in graph.entries} == {"region"}


def test_the_operator_saves_bytes(monkeypatch):
    """Beside inductor, too, which writes all of it as one kernel: nothing is moved once more."""
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    entry, _ = compiled_graphs.replace_in(recorded(lambda x, w: by_unflatten(norm(x, w)), given(8), "dynamo")[0], True)
    assert entry.is_replaced, entry.why


LEFT = [
    (lambda y: by_unflatten(y, 96), "parts of 96 columns are reduced; accepted: a power of two from 8 to 1024"),
    (lambda y: by_unflatten(y, 4), "parts of 4 columns are reduced; accepted: a power of two from 8 to 1024"),
    (
        lambda y: y.unflatten(-1, (-1, 64)) / y.unflatten(-1, (-1, 64)).abs().amax(-2, keepdim=True),
        "amax.default reduces dimensions (-2,); accepted: those of other reductions",
    ),
]


@pytest.mark.parametrize(("function", "why"), LEFT)
def test_what_is_left(function, why, monkeypatch):
    """Rows are a region, and parts are another, which says why they are two."""
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    module, _ = recorded(lambda x, w: function(norm(x, w)), given(8, columns=384), "dynamo")
    entries = compiled_graphs.replace_in(module, declines=True)
    assert not any(entry.is_replaced for entry in entries) and why in entries[-1].why


def test_gradients():
    """Those of a softmax have kernels. Where others have none, rows and parts are regions by themselves."""
    for function, count in ((likely, 1), (heads, 2)):
        tensors = [t.requires_grad_() for t in given(4)]
        module, inputs, verdicts = regions_of(function, *tensors)
        assert [why for _, why in verdicts] == [""] * count
        want = function(*tensors)
        grad = torch.randn_like(want)
        (got,) = as_tuple(module(*inputs))
        for one, other in zip(
            torch.autograd.grad(got, tensors, grad), torch.autograd.grad(want, tensors, grad), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)


def test_a_largest_value_with_a_gradient_is_torchs():
    """It goes to one of equal elements there."""
    x = torch.ones(3, 8, requires_grad=True)
    _, _, verdicts = regions_of(lambda x: x.max(-1)[0] + x.float().sum(-1), x)
    assert not any("MAX" in str(step) for region, why in verdicts if not why for step in region.program.steps)


def test_extents_are_asked_of_what_is_given():
    """So no reader of extents alone stands between a norm and what is behind it."""
    x, w = given(3)
    torch._dynamo.mark_dynamic(x, 0)
    module, _ = recorded(lambda x, w: by_view(norm(x, w)), (x, w), "dynamo")
    selection.replace_in(module, False)
    asked = [node.args[0].op for node in module.graph.nodes if node.target == "size"]
    assert asked and {*asked} == {"placeholder"}


def test_what_is_tried_is_not_logged(monkeypatch):
    """`repeat` is tried on the parts of rows, which have a dimension more."""
    logger, said = logging.getLogger("torch._subclasses.fake_tensor"), []
    monkeypatch.setattr(logger, "handle", lambda record: logger.filter(record) and said.append(record))

    def function(x, w):
        return (x.view(4, 8, 4) * w).softmax(-1).view(4, 32).repeat(2, 1).softmax(-1)

    x, w = torch.randn(4, 32), torch.randn(4)
    made = torch.compile(function, backend="graphfuse", options={"then": "eager", "decline": False})(x, w)
    torch.testing.assert_close(made, function(x, w))
    assert said == [] and not logger.filters
