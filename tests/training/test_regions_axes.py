"""Regions whose rows lie along another dimension than the last: values, gradients, and where results lie."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch import compile_report
from graphfuse.torch.analysis import cost
from graphfuse.torch.regions import selection
from support.traces import as_tuple

pytestmark = pytest.mark.torch

FULL, HALF = torch.float32, torch.bfloat16


def unit(x, w):
    """As the VAE of WAN has it."""
    return F.silu(F.normalize(x, dim=1) * 4 * w)


def of_channels(x, w):
    """As ConvNeXt has it."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return w * ((x - mean) / torch.sqrt(variance + 1e-6))


def two_outputs(x, w):
    return torch.softmax(x * w, 1), (x * w).amax(1)


def of_the_middle(x, w):
    """With results of one number a row."""
    y = x * w
    return y - y.amax(2, keepdim=True), torch.logsumexp(y, 2), y.sum(2, keepdim=True)


def both_ways(x, w):
    return torch.softmax(x * w, 1), torch.softmax(x * w, -1)


FUNCTIONS = {f.__name__: f for f in (unit, of_channels, two_outputs, of_the_middle, both_ways)}


def compiled(function, declines=False, **options):
    found = []

    def backend(module, inputs):
        verdicts, _ = selection.replace_in(module, declines)
        found.extend(verdicts)
        return module.forward

    torch.compiler.reset()
    return torch.compile(function, backend=backend, **options), found


def given(dtype=FULL, layout=torch.contiguous_format, rows=(2, 5, 7), gradients=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows[0], 16, *rows[1:], generator=generator).to(dtype).contiguous(memory_format=layout)
    return [t.requires_grad_(gradients) for t in (x, torch.randn(16, 1, 1, generator=generator).to(dtype))]


def lies(t):
    return [stride for stride, extent in zip(t.stride(), t.shape, strict=True) if extent > 1]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_places(name, dtype, layout):
    tensors, (function, found) = given(dtype, layout), compiled(FUNCTIONS[name])
    rtol, atol = (1e-5, 1e-6) if dtype is FULL else (2e-2, 1e-3)
    for got, want in zip(as_tuple(function(*tensors)), as_tuple(FUNCTIONS[name](*tensors)), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
        assert lies(got) == lies(want)
    assert found and (layout is torch.channels_last or not any(why for _, why in found))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_axes_are_two_regions(name):
    function, found = compiled(FUNCTIONS[name])
    function(*given())
    assert len(found) == 1 + (name == "both_ways")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name, layout):
    made = []
    function, found = compiled(FUNCTIONS[name])
    for f in (function, FUNCTIONS[name]):
        tensors = given(layout=layout, gradients=True)
        results = as_tuple(f(*tensors))
        outer = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in results]
        made.append(torch.autograd.grad(results, tensors, outer))
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert found


def test_gradients_of_rows_that_lie_apart():
    """A weight's gradient is a sum over the rows, along axes apart."""
    function, found = compiled(lambda x, w: torch.softmax(x * 2, 1))
    function(*given(gradients=True))
    assert [why for _, why in found] == [""]
    function, found = compiled(of_channels)
    function(*given(gradients=True))
    assert [why for _, why in found] == [""]
    function, found = compiled(of_channels)
    function(*given(layout=torch.channels_last, gradients=True))
    assert [why for _, why in found] == [""]


def test_few_elements_of_rows_that_lie_apart_are_left(monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    function, found = compiled(lambda x, w: torch.softmax(x * 2, 1), declines=True)
    function(*given(gradients=True))
    assert [why for _, why in found] == [""]
    for least, gradients in ((12, False), (4, True)):
        function, found = compiled(of_channels, declines=True)
        function(*given(gradients=gradients))
        why = f"its rows are not along the last dimension; accepted: tensors of {least} MiB or more, or a softmax"
        assert [told for _, told in found] == [why]
    monkeypatch.setattr(selection, "_ENOUGH", {True: 0, False: 0})
    for gradients in (False, True):
        function, found = compiled(of_channels, declines=True)
        function(*given(gradients=gradients))
        assert [why for _, why in found] == [""]


LEFT = [
    (
        lambda x: x * x.max(1, keepdim=True)[0],
        True,
        "max: s9: columns are numbered; accepted where columns are neighbours",
    ),
    (
        lambda x: (x * x).sum(1),
        False,
        "sum: it makes a number a row, along another dimension than the last: inductor's",
    ),
    (lambda x: x.argmax(1), False, "argmax: no op computes argmax.default of such arguments"),
    (
        lambda x: torch.nn.functional.group_norm(x, 4),
        False,
        "group_norm: a view that moves elements",
    ),
    (lambda x: x.max(1), False, "max: no op makes its result of torch.int64"),
    (
        lambda x: x - x.mean((0, 2, 3), keepdim=True),
        False,
        "mean: mean.dim reduces dimensions (0, 2, 3); accepted: one, or neighbours",
    ),
]


@pytest.mark.parametrize(("function", "gradients", "why"), LEFT)
def test_why_a_reduction_is_in_no_region(function, gradients, why):
    torch.compiler.reset()
    torch.compile(function, backend="graphfuse", options={"then": "eager"})(given(gradients=gradients)[0])
    (entry,) = compile_report().graphs[-1].entries
    assert not entry.is_replaced and entry.why.startswith(why)


def test_a_number_a_row_alone_is_left():
    """It takes the same bytes, and such rows are what a loop over columns reads side by side."""
    function, found = compiled(lambda x, w: (x * w).sum(1))
    function(*given())
    assert not found


def test_extents_that_vary():
    function, found = compiled(unit, dynamic=True)
    for rows in ((2, 5, 7), (3, 4, 6), (5, 2, 9)):
        tensors = given(rows=rows)
        torch.testing.assert_close(function(*tensors), unit(*tensors))
    assert len(found) == 1


def test_a_result_lies_as_in_eager_mode_whatever_a_region_reads():
    """Of the sum, the first term is row-major, and the second, which another region's step might make, is not."""

    def function(x, kernel, w):
        residual = F.conv2d(x, kernel, stride=2).flatten(2).transpose(1, 2) + 1
        heads = (residual @ w).unflatten(2, (2, 8)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return F.layer_norm(F.linear(attended, w) + residual, (16,))

    run, found = compiled(function, dynamic=True)
    for samples, width in ((2, 16), (3, 8)):
        tensors = [torch.randn(shape) for shape in ((samples, 3, 8, width), (16, 3, 2, 2), (16, 16))]
        got, want = run(*tensors), function(*tensors)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    assert {why for _, why in found} == {""}


def test_an_exported_program():
    """The graph as text says how results lie."""
    function, found = compiled(unit)
    x, w = given()
    want = function(x, w)
    ((region, _),) = found
    assert '"follows":true' in region.program.text
    (got,) = torch.ops.graphfuse.region.default([x.movedim(1, -1), w.permute(1, 2, 0)], region.program.text)
    assert torch.equal(got.movedim(-1, 1), want) and got.stride() == x.movedim(1, -1).stride()


@pytest.mark.parametrize(("dim", "shapes"), [(1, ((4, 16, 8), (16, 1))), (-1, ((32, 16), (16,)))])
def test_the_largest_of_what_forward_rounds_otherwise(dim, shapes, monkeypatch):
    """Backward computes these values again, in another kernel, and looks for the largest among them."""
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")

    def function(x, b):
        y = torch.softmax(x, dim) * 4 + b
        return y - y.amax(dim, keepdim=True) * 0.5

    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"then": "eager", "decline": False})
    made = []
    for f in (run, function):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        made.append(torch.autograd.grad(f(*tensors).sum(), tensors))
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
