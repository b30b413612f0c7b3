"""Regions whose rows lie along several dimensions, or are a whole tensor: values, gradients, what is left and why."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch import compile_report
from graphfuse.torch.analysis import cost
from graphfuse.torch.compile_backend import compiled_graphs
from support.regions import FULL, HALF
from support.regions import found as regions_of
from support.traces import as_tuple, recorded

pytestmark = pytest.mark.torch

N, C, H, W = 3, 6, 4, 8
LARGEST = 448.0


def layer(x, w, b):
    return F.layer_norm(x, x.shape[1:], w, b)


def gated(x, w, b):
    """As squeeze and excitation has it, without products between."""
    return x * torch.sigmoid(x.mean((-2, -1), keepdim=True))


def instance(x, w, b):
    variance = x.var((2, 3), keepdim=True, unbiased=False)
    return F.relu((x - x.mean((2, 3), keepdim=True)) * torch.rsqrt(variance + 1e-5))


def by_tensor(x, w, b):
    largest = x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * (LARGEST / largest)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), largest / LARGEST


def lengths(x, w, b):
    """As global response normalization has them."""
    return x.pow(2).sum((2, 3), keepdim=True).sqrt()


FUNCTIONS = {
    "layer norm": (layer, "layernorm"),
    "RMSNorm": (lambda x, w, b: F.rms_norm(x, x.shape[1:], w), "rmsnorm"),
    "layer norm of two": (lambda x, w, b: F.layer_norm(x + 1, x.shape[2:], w[0]) * b, "add, layernorm"),
    "means of pixels": (gated, "reduction, sigmoid, mul"),
    "instance norm": (instance, ""),
    "a unit tensor": (lambda x, w, b: x / x.float().norm(), "reduction, div"),
    "FP8 of a tensor": (by_tensor, ""),
    "largest of samples": (lambda x, w, b: x / x.abs().amax((1, 2, 3), keepdim=True), "abs, reduction, div"),
    "squares of samples": (lambda x, w, b: x.pow(2).sum((1, 2, 3)), "mul, reduction"),
    "lengths": (lengths, "mul, reduction, sqrt"),
    "log-sum-exp": (lambda x, w, b: torch.logsumexp(x, (-2, -1), keepdim=True) - x, "logsumexp, sub"),
    "deviations": (lambda x, w, b: x.std((1, 2, 3)), "reduction, sub, mul"),
    "squared error": (lambda x, w, b: F.mse_loss(x, x.flip(0)), "sub, mul, reduction"),
    "sum of squared errors": (lambda x, w, b: F.mse_loss(x, x.flip(0), reduction="sum"), "sub, mul, reduction"),
    "squared errors": (lambda x, w, b: F.mse_loss(x, x.flip(0), reduction="none").mean((1, 2, 3)), "sub, mul"),
    "a mean": (lambda x, w, b: x.mean(), "reduction"),
    "least and most": (lambda x, w, b: x.max() - x.min(), "reduction, sub"),
}

OF_DYNAMO = {
    "torch's instance norm": (lambda x, w, b: F.instance_norm(x), ""),
    "torch's instance norm with weights": (
        lambda x, w, b: F.instance_norm(x, None, None, w[:, 0, 0], b[:, 0, 0]),
        "layernorm, mul, add",
    ),
    "group norm of one": (lambda x, w, b: F.silu(F.group_norm(x, 1)), "layernorm, swish"),
    "group norm of channels": (lambda x, w, b: F.group_norm(x, C, w[:, 0, 0]), "layernorm, mul"),
}
"""Which other recordings have as torch's kernels."""


def given(dtype=FULL, gradients=False, shape=(N, C, H, W)):
    """Rows of several dimensions, and weights of these."""
    generator = torch.Generator().manual_seed(0)
    shapes = shape, shape[1:], shape[1:]
    return [torch.randn(one, generator=generator).to(dtype).requires_grad_(gradients) for one in shapes]


def check(function, tensors, how="dynamo"):
    """That a function has one region, which computes what eager mode does; the region."""
    module, inputs, verdicts = regions_of(function, *tensors, how=how)
    assert [why for _, why in verdicts] == [""]
    for got, want in zip(as_tuple(module(*inputs)), as_tuple(function(*tensors)), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        error = 1e-5 if tensors[0].dtype is FULL else 2e-2
        torch.testing.assert_close(got.float(), want.float(), rtol=error, atol=error)
    return verdicts[0][0]


@pytest.mark.parametrize("how", ["dynamo", "aten"])
@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, dtype, how):
    function, operations = FUNCTIONS[name]
    assert check(function, given(dtype), how).program.operations.startswith(operations)


@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("name", OF_DYNAMO)
def test_what_torch_has_kernels_of_its_own_for(name, dtype):
    function, operations = OF_DYNAMO[name]
    assert check(function, given(dtype)).program.operations.startswith(operations)


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["layer norm", "means of pixels", "FP8 of a tensor", "squared error"])
def test_a_region_is_one_kernel(name, kernels):
    check(FUNCTIONS[name][0], given(HALF))
    assert kernels and all(parts == [True] for parts in kernels.values())


GRADED = ["layer norm", "RMSNorm", "layer norm of two", "means of pixels", "instance norm", "a unit tensor"]
GRADED += ["largest of samples", "log-sum-exp", "torch's instance norm", "group norm of one"]


@pytest.mark.parametrize("name", GRADED)
def test_gradients(name):
    function, tensors = (FUNCTIONS | OF_DYNAMO)[name][0], given(gradients=True)
    module, inputs, verdicts = regions_of(function, *tensors)
    assert [why for _, why in verdicts] == [""]
    (got,), want = as_tuple(module(*inputs)), function(*tensors)
    grad, asked = torch.randn_like(want), [t for t in tensors if any(t is one for one in inputs)]
    for one, other in zip(torch.autograd.grad(got, asked, grad), torch.autograd.grad(want, asked, grad), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [16, 64])
def test_gradients_of_weights_of_long_rows_are_planned(rows):
    """Column sums over few rows."""
    with torch.device("meta"):
        tensors = given(HALF, gradients=True, shape=(rows, 256, 32, 32))
    _, _, verdicts = regions_of(layer, *tensors)
    assert [why for _, why in verdicts] == [""]


@pytest.mark.parametrize("name", ["squares of samples", "squared error", "a mean"])
def test_gradients_that_reduce_nothing_are_left(name):
    _, _, ((_, why),) = regions_of(FUNCTIONS[name][0], *given(gradients=True))
    assert why.startswith("nothing is reduced for its gradients")


SLICES = {
    "samples": (lambda t: t[::2], True),
    "channels": (lambda t: t[:, 1:], True),
    "pixels": (lambda t: t[..., 1:], False),
    "turned": (lambda t: t.mT, False),
    "channels last": (lambda t: t.contiguous(memory_format=torch.channels_last), False),
}


@pytest.mark.parametrize("name", SLICES)
def test_where_rows_lie(name):
    cut, is_taken = SLICES[name]
    x = cut(given()[0])
    module, inputs, verdicts = regions_of(lambda x: F.layer_norm(x, x.shape[1:]), x)
    assert len(verdicts) == is_taken
    torch.testing.assert_close(module(*inputs)[0], F.layer_norm(x, x.shape[1:]), rtol=1e-5, atol=1e-5)


LEFT = {
    "channels last": (
        lambda x: F.layer_norm(x.contiguous(memory_format=torch.channels_last), x.shape[1:]),
        "layer_norm: it reads (3, 6, 4, 8) with strides (192, 1, 48, 6), whose rows are not one",
    ),
    "a batch": (
        lambda x: x - x.mean((0, 2, 3), keepdim=True),
        "mean: mean.dim reduces dimensions (0, 2, 3); accepted: one, or neighbours whose extents do not vary",
    ),
    "groups": (lambda x: F.group_norm(x, 3), "group_norm: a view that moves elements"),
    "weights of channels": (
        lambda x: F.group_norm(x, 1, x[0, :, 0, 0]),
        "group_norm: it reads (6,) together with rows of shape (6, 4, 8); accepted: all columns, or none",
    ),
    "what is known of other samples": (
        lambda x: F.instance_norm(x, x[0, :, 0, 0], x[0, :, 0, 0].abs(), use_input_stats=False),
        "instance_norm: a view that moves elements",
    ),
}


def reported(function, *tensors, **options):
    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"then": "eager"}, **options)
    torch.testing.assert_close(run(*tensors), function(*tensors), rtol=1e-5, atol=1e-5)
    return compile_report().graphs[-1].entries


@pytest.mark.parametrize("name", LEFT)
def test_why_a_reduction_is_in_no_region(name):
    function, why = LEFT[name]
    (entry,) = reported(function, given()[0])
    assert not entry.is_replaced and entry.why.startswith(why)


def test_rows_of_any_number(nothing_compiled):
    def function(x, w, b):
        return layer(x, w, b), x.mean((-2, -1))

    run = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"})
    for rows in (3, 4, 7):
        tensors = given(shape=(rows, C, H, W))
        torch._dynamo.mark_dynamic(tensors[0], 0)
        for got, want in zip(run(*tensors), function(*tensors), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (graph,) = compile_report().graphs
    assert [entry.became for entry in graph.entries] == ["region", "region"]


def test_columns_of_any_number_are_left(nothing_compiled):
    x, *_ = given()
    torch._dynamo.mark_dynamic(x, 2)
    (entry,) = reported(lambda x: x - x.mean((2, 3), keepdim=True), x)
    assert entry.why.endswith("accepted: one, or neighbours whose extents do not vary")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "meta")


def judged(function, *shapes, gradients=False):
    with torch.device("meta"):
        given = [torch.empty(shape, dtype=HALF, requires_grad=gradients) for shape in shapes]
        graph, _ = recorded(function, given, "dynamo")
    return compiled_graphs.replace_in(graph, declines=True)


def of_samples(x):
    return F.layer_norm(x, x.shape[1:])


LONG, SHORT = (64, 64, 32, 32), (8, 32, 32, 32)

# Why the first region is left to inductor; "" where it is not.
BESIDE = {
    "alone": (of_samples, [LONG], ""),
    "a product behind it": (lambda x, m: of_samples(x) @ m, [LONG, (32, 32)], ""),
    "elements": (lambda x: F.gelu(of_samples(x)), [LONG], ""),
    "a weight of each channel behind it": (lambda x, w: of_samples(x) * w, [LONG, (64, 1, 1)], "move 4 bytes"),
    "a weight of each channel before it": (lambda x, w: of_samples(x * w), [LONG, (64, 1, 1)], "move 4 bytes"),
    "another reduction of a sample": (lambda x: (of_samples(x), x.any((1, 2, 3))), [LONG], "move 2 bytes"),
    "few short rows": (of_samples, [SHORT], ""),
    "few long rows": (of_samples, [(8, 64, 32, 32)], ""),
    "gradients of few long rows": (
        of_samples,
        [(8, 64, 32, 32)],
        "it has 8 rows of 65536 columns, whose gradients",
    ),
    "one long row": (lambda x: by_tensor(x, x, x), [LONG], ""),
    "one short row": (lambda x: by_tensor(x, x, x), [(8, 64, 64)], ""),
    "a number": (
        lambda x, y: F.mse_loss(x, y),
        [(8, 64, 64)] * 2,
        "it makes numbers of a whole tensor: inductor's kernels move the same",
    ),
    "numbers of samples": (lambda x: x.pow(2).sum((1, 2, 3)), [LONG], ""),
    "a gate": (lambda x, m: x * (x.mean((-2, -1)) @ m).sigmoid()[..., None, None], [LONG, (64, 64)], ""),
    "behind a convolution": (
        lambda x, w: (lambda y: y * y.mean((-2, -1), keepdim=True).sigmoid())(F.conv2d(x, w)),
        [LONG, (64, 64, 1, 1)],
        "next to convolutions inductor keeps channels last",
    ),
    "channels": (lambda x, w: F.instance_norm(x, None, None, w), [LONG, (64,)], ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_inductor(name, as_on_a_gpu):
    function, shapes, why = BESIDE[name]
    entry, *_ = judged(function, *shapes, gradients=name.startswith("gradients"))
    assert entry.is_replaced is not bool(why) and why in entry.why


def test_rows_of_two_extents_that_vary_are_left(nothing_compiled):
    """No view says both."""
    x, *_ = given()
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    (entry,) = reported(lambda x: x - x.mean((2, 3), keepdim=True), x)
    assert entry.why.endswith("its rows are viewed with other dimensions, and several extents vary")
