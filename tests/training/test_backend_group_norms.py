"""Group norms in graphs that are compiled: moments by an operator, the rest for inductor."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import cost
from graphfuse.torch.compile_backend import compiled_graphs, group_norms
from support.traces import recorded

pytestmark = pytest.mark.torch

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def of_any_size_on_the_cpu(monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    monkeypatch.setattr(group_norms, "LEAST", 0)


def drawn(*shape, dtype=torch.float32, last=False):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2 + 9).to(dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def vectors(channels, dtype=torch.float32):
    return tuple(torch.linspace(-1, 2, channels).add(n).to(dtype) for n in range(2))


def left_or_replaced(function, given):
    """What a function makes, its group norms replaced, and what these became."""
    graph, inputs = recorded(function, given, "dynamo")
    entries = compiled_graphs.replace_in(graph, declines=True)
    with torch.no_grad():
        return graph(*inputs)[0], [e.became for e in entries]


def normed(x, w, b):
    return F.silu(F.group_norm(x, 4, w, b, 1e-3))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
@pytest.mark.parametrize("shape", [(2, 16, 8, 12), (1, 12, 3, 4, 12), (3, 8, 96)], ids=str)
def test_values_are_torchs_in_any_layout(shape, last, dtype):
    given = drawn(*shape, dtype=dtype, last=last), *vectors(shape[1], dtype)
    made, became = left_or_replaced(normed, given)
    wanted = normed(*(t.double() for t in given))
    assert became == ["channel_moments"] and made.dtype is dtype and made.stride() == given[0].stride()
    assert (made - wanted).abs().max() <= 2 * CLOSE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_without_a_weight_or_a_bias(with_weight, with_bias):
    w, b = vectors(16)
    given = [drawn(2, 16, 8, 8), *[w] * with_weight, *[b] * with_bias]

    def function(x, *others):
        others = [*others]
        weight = others.pop(0) if with_weight else None
        return F.group_norm(x, 4, weight, others[0] if others else None)

    made, became = left_or_replaced(function, given)
    assert became == ["channel_moments"]
    torch.testing.assert_close(made, function(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    {
        "too few places": lambda x: F.group_norm(x[:, :, :1, :9], 4),
        "no places": lambda x: F.group_norm(x[:, :, 0, 0], 4),
        "what is changed later": lambda x: (lambda y, same: (F.group_norm(y, 4), same.add_(1), y))(x, x.view_as(x)),
        "of a transform": lambda x: torch.func.vmap(lambda y: F.group_norm(y[None], 4))(x),
    }.items(),
    ids=lambda one: one[0],
)
def test_others_are_left(function):
    _, became = left_or_replaced(function[1], [drawn(2, 16, 8, 8)])
    assert "channel_moments" not in became


def test_those_with_gradients_are_left():
    assert left_or_replaced(lambda x: F.group_norm(x, 4), [drawn(2, 16, 8, 8).requires_grad_()])[1] == [""]


def test_small_ones_are_inductors(monkeypatch):
    monkeypatch.setattr(group_norms, "LEAST", 1 << 12)
    assert left_or_replaced(lambda x: F.group_norm(x, 4), [drawn(1, 16, 8, 8)])[1] == [""]
    assert left_or_replaced(lambda x: F.group_norm(x, 4), [drawn(4, 16, 8, 8)])[1] == ["channel_moments"]


def test_between_convolutions_it_has_their_layout():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 4, 3)).eval()
    model.to(memory_format=torch.channels_last)
    x = drawn(1, 4, 18, 18, last=True)
    with torch.no_grad():
        wanted, made = model(x), torch.compile(model, backend="graphfuse")(x)
    assert made.stride() == wanted.stride()
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
