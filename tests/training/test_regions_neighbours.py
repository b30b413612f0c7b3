"""Rotations of pairs of neighbouring columns behind a norm, of each head or over all of them, in graphs: one kernel,
which has torch's bits, in whatever way it is written; what is left as it is."""

import pytest
import torch
from torch.nn import functional

from graphfuse.torch import compile_report
from graphfuse.torch.regions import selection
from support.traces import recorded

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
HALF, FULL = torch.bfloat16, torch.float32
B, T, H, D = 2, 5, 4, 32


def over_all(x, w):
    return functional.rms_norm(x, x.shape[-1:], w, 1e-6)


def heads(x):
    return x.unflatten(2, (H, -1))


def turned(x):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-second, first), dim=-1).flatten(-2)


def as_ltx(x, w, cos, sin):
    """One angle for each column of all heads, which are none yet."""
    x = over_all(x, w)
    cos, sin = (t.expand(1, T, H, D).flatten(2) for t in (cos, sin))
    return (x.float() * cos + turned(x).float() * sin).to(x.dtype)


def written(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out.type_as(x)


def as_wan(x, w, cos, sin):
    """Both columns of a pair are written into a new tensor."""
    return written(heads(over_all(x, w)), cos, sin)


def as_flux(x, w, cos, sin):
    """The norm is that of each head."""
    x = functional.rms_norm(heads(x), (D,), w[:D], 1e-6)
    real, other = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    other = torch.stack([-other, real], dim=-1).flatten(3)
    return (x.float() * cos + other.float() * sin).to(x.dtype)


def by_slices(x, w, cos, sin):
    """As GPT-J writes it."""
    x = heads(over_all(x, w))
    other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + other * sin


def stacked(x, w, cos, sin):
    x = heads(over_all(x, w)).float()
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    first, second, cos, sin = pairs[..., 0], pairs[..., 1], cos[..., ::2], sin[..., ::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(HALF)


def for_both(x, w, cos, sin):
    q, k = heads(over_all(x, w)), heads(over_all(torch.softmax(x, 1), w))
    return written(q, cos, sin), written(k, cos, sin)


def given(dtype=HALF, samples=1, angles=FULL):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g).to(dtype) for shape in ((B, T, H * D), (H * D,)))
    return x, w, *(torch.randn(samples, T, 1, D, generator=g).to(angles) for _ in range(2))


def replaced(function, tensors, how="dynamo"):
    """Programs of what was replaced. The graph then makes what the function makes, bit for bit."""
    graph, arguments = recorded(function, tensors, how)
    verdicts, _ = selection.replace_in(graph, declines=False)
    made, wanted = graph(*arguments), function(*tensors)
    for got, want in zip(*(t if isinstance(t, tuple) else (t,) for t in (made, wanted)), strict=True):
        assert got.dtype is want.dtype and got.stride() == want.stride() and torch.equal(got, want)
    assert not any(why for _, why in verdicts)
    return [region.program for region, _ in verdicts]


def turns(program):
    return [step.attributes["interleaved"] for step in program.steps if step.op == "turn_pairs"]


WAYS = [as_ltx, as_wan, as_flux, by_slices, stacked]


@pytest.mark.parametrize("angles", [FULL, HALF])
@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("function", WAYS)
def test_a_norm_and_a_rotation_are_one_kernel(function, dtype, angles):
    (program,) = replaced(function, given(dtype, angles=angles))
    assert turns(program) == [True] and "rmsnorm" in program.operations


@pytest.mark.parametrize("function", [as_flux, by_slices, as_ltx])
def test_in_graphs_of_aten(function):
    (program,) = replaced(function, given(), "aten")
    assert turns(program) == [True]


@pytest.mark.parametrize("samples", [1, B])
def test_queries_and_keys_share_the_angles(samples):
    programs = [one for one in replaced(for_both, given(samples=samples)) if turns(one)]
    assert len(programs) == 2 and programs[0].text == programs[1].text


def read_elsewhere(x, w, cos, sin):
    x = heads(over_all(x, w))
    return written(x, cos, sin), x.relu()


def other_sign(x, w, cos, sin):
    x = heads(over_all(x, w))
    other = torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + other * sin


def other_order(x, w, cos, sin):
    """Halves of a new tensor, not every second column."""
    x = heads(over_all(x, w))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., : D // 2] = first * cos[..., ::2] - second * sin[..., ::2]
    out[..., D // 2 :] = first * sin[..., ::2] + second * cos[..., ::2]
    return out


def written_again(x, w, cos, sin):
    out = written(heads(over_all(x, w)), cos, sin)
    out[..., 0] = 0
    return out


def read_between(x, w, cos, sin):
    x = heads(over_all(x, w))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.zeros_like(x)
    out[..., 0::2] = first * cos[..., ::2] - second * sin[..., ::2]
    before = out + 1
    out[..., 1::2] = first * sin[..., ::2] + second * cos[..., ::2]
    return out, before


def of_other_angles(x, w, cos, sin):
    x = heads(over_all(x, w))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    made = first * cos[..., ::2] - second * sin[..., ::2], first * sin[..., ::2] + second * cos[..., 1::2]
    return torch.stack(made, dim=-1).flatten(-2)


def of_one_part(x, w, cos, sin):
    """Pairs of some columns, beside which others stay as they are."""
    x = heads(over_all(x, w))
    some, rest = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((written(some, cos[..., : D // 2], sin[..., : D // 2]), rest), dim=-1)


APART = [read_elsewhere, other_sign, other_order, written_again, read_between, of_other_angles, of_one_part]
OF_MORE = (read_elsewhere, written_again)
"""A rotation, beside which something else is read or written."""


@pytest.mark.parametrize("function", APART)
def test_what_is_something_else_has_the_same_values(function):
    programs = replaced(function, given())
    assert programs and not any(turns(one) for one in programs if function not in OF_MORE)


def test_without_a_norm_nothing_is_changed():
    graph, _ = recorded(lambda x, w, cos, sin: written(heads(x @ x.mT @ x), cos, sin), given(), "dynamo")
    before = str(graph.graph)
    selection.replace_in(graph, declines=False)
    assert "setitem" in before and str(graph.graph).count("setitem") == before.count("setitem")


@pytest.mark.parametrize("function", WAYS)
def test_gradients(function):
    tensors = [t.requires_grad_(n < 2) for n, t in enumerate(given(FULL))]
    run = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    got, want = (
        torch.autograd.grad(made.float().square().sum(), tensors[:2]) for made in (run(*tensors), function(*tensors))
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_angles_that_have_a_gradient():
    tensors = given(FULL)
    cos = tensors[2].requires_grad_()
    run = torch.compile(as_wan, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    got, want = (torch.autograd.grad(f(*tensors).square().sum(), cos)[0] for f in (run, as_wan))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_tokens_that_vary():
    run = torch.compile(as_wan, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    for tokens in (T, 3):
        x, w, cos, sin = given(FULL)
        x, cos, sin = (t[:, :tokens].contiguous() for t in (x, cos, sin))
        for t in (x, cos, sin):
            torch._dynamo.mark_dynamic(t, 1)
        torch.testing.assert_close(run(x, w, cos, sin), as_wan(x, w, cos, sin), rtol=1e-5, atol=1e-5)
    found = compile_report()
    assert not found.left and all("turn_pairs" in e.why for e in found.replaced)


@pytest.mark.emulate
@pytest.mark.parametrize("function", [as_wan, as_ltx])
def test_kernels_have_the_values(function, plan_on):
    tensors = given()
    want = function(*tensors)
    plan_on("emulator")
    graph, arguments = recorded(function, tensors, "dynamo")
    selection.replace_in(graph, declines=False)
    (made,) = graph(*arguments)
    torch.testing.assert_close(made, want, rtol=2**-7, atol=2**-7)
