"""Calls with layouts that no kernel takes: made on contiguous copies of what they read, unless that is written, too."""

import pytest
import torch

import graphfuse.torch as gt
from graphfuse import ReferenceEngineWarning, functional
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.functional import problem, rank_functions
from graphfuse.functional.call import AcceptedCall

pytestmark = pytest.mark.emulate


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    """On the emulator, without the reference engine."""
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")
    monkeypatch.setattr(ReferenceEngine, "run", None)
    problem.warned.clear()


def x(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "columns apart": lambda t: torch.stack((t, t), -1)[..., 0],
    "rows across": lambda t: t.movedim(-1, 1).contiguous().movedim(1, -1),
    "columns reversed in memory": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_with_contiguous_tensors(layout):
    t, weight, spread = x(3, 5, 7, 64), x(64, seed=2), LAYOUTS[layout]
    other = spread(t)
    assert not other.is_contiguous() and torch.equal(other, t)
    for f, more in (
        (functional.rmsnorm, (weight,)),
        (functional.layernorm, (weight, weight)),
        (functional.softmax, ()),
        (functional.normalize, ()),
    ):
        want = f(t, *more)
        for _ in range(3):  # the first, then by a fast path
            got = f(other, *more)
            assert torch.equal(got, want)
        assert torch.equal(f(t, *more), want)


def test_other_row_counts_and_layouts_in_turn():
    weight = x(64)
    for rows in (5, 7, 5, 1, 3):
        for spread in (*LAYOUTS.values(), lambda t: t):
            t = x(rows, 3, 64, seed=rows)
            assert torch.equal(functional.rmsnorm(spread(t), weight), functional.rmsnorm(t, weight))


@pytest.mark.filterwarnings("error")
def test_no_rows(monkeypatch):
    monkeypatch.undo()  # the reference engine runs for no rows, and does nothing
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")
    assert functional.rmsnorm(LAYOUTS["columns apart"](x(6, 64))[:0], x(64)).shape == (0, 64)


def test_a_result_given_by_the_caller():
    t, weight, out = x(6, 64), x(64), torch.zeros(6, 64)
    spread = LAYOUTS["columns apart"](t)
    assert functional.rmsnorm(spread, weight, out=out) is out
    assert torch.equal(out, functional.rmsnorm(t, weight))


def test_what_is_written_is_not_copied():
    spread = x(6, 128)[:, ::2]
    with pytest.warns(ReferenceEngineWarning), pytest.raises(TypeError):  # the reference engine is off
        functional.fused_add_rmsnorm(spread, x(6, 64), x(64))


@pytest.mark.parametrize("more", [(), ("peers",), ("peers", "out_peers")])
def test_what_other_ranks_read_is_not_copied(more):
    f, spread = rank_functions.declare("mine", "x", "residual", "weight", *more), x(6, 128)[:, ::2]
    call = AcceptedCall(f, f.variants, {"x": spread}, {"x": spread}, {}, {}, 0)
    assert call.strided == (() if more else ("x",))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    spread = LAYOUTS[layout]
    given = [spread(x(2, 3, 4, 64)).requires_grad_(), x(64, seed=2).requires_grad_(), x(64, seed=3).requires_grad_()]
    dy = spread(x(2, 3, 4, 64, seed=4))
    for f, own in (
        (gt.layer_norm, lambda t, w, b: torch.nn.functional.layer_norm(t, (64,), w, b)),
        (
            lambda t, w, b: gt.rms_norm(t, w, 1e-5) + b,
            lambda t, w, b: torch.nn.functional.rms_norm(t, (64,), w, 1e-5) + b,
        ),
    ):
        got, want = f(*given), own(*given)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for one, other in zip(torch.autograd.grad(got, given, dy), torch.autograd.grad(want, given, dy), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
