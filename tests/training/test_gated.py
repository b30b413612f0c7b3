"""RMSNorm with an activated gate: values, gradients of what is asked for, and one kernel each way."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.operators import declared as operators

pytestmark = pytest.mark.torch

EPS = 1e-5
HALF, DOUBLE = torch.bfloat16, torch.float64

OPERATORS = {
    f"{prefix}{suffix}": operators.OF_MODELS[f"{prefix}{suffix}"]
    for prefix in ("rms_norm", "llama_rms_norm", "gemma_rms_norm")
    for suffix in ("_times_silu", "_times_sigmoid", "_of_gated")
}


def exact(name, x, gate, weight):
    """In the type of its arguments, without any rounding to another."""
    activated = gate.sigmoid() if name.endswith("sigmoid") else F.silu(gate)
    x = x * activated if name.endswith("of_gated") else x
    y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = y if weight is None else y * (weight + 1 if name.startswith("gemma") else weight)
    return y if name.endswith("of_gated") else y * activated


def drawn(shape, weight=None, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in (shape, shape, weight or shape[-1:])]


@pytest.mark.each_value
@pytest.mark.parametrize("weight", [(6,), (4, 6), None], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients(name, weight):
    x, gate, w = drawn((3, 4, 6), weight, DOUBLE)
    given = (x, gate, w) if weight else (x, gate)
    run = lambda x, gate, w=None: OPERATORS[name].run(x, gate, w, EPS)  # noqa: E731
    torch.testing.assert_close(run(*given), exact(name, x, gate, w if weight else None))
    assert torch.autograd.gradcheck(run, given)


@pytest.mark.parametrize("name", ["rms_norm_times_silu", "gemma_rms_norm_times_sigmoid", "llama_rms_norm_of_gated"])
@pytest.mark.parametrize("weight", [(16,), (4, 16)], ids=str)
def test_gradients_that_nobody_asks_for_are_not_made(name, weight):
    outer = torch.randn(3, 4, 16)
    for asked in itertools.product((False, True), repeat=3):
        given = [t.detach().requires_grad_(wanted) for t, wanted in zip(drawn((3, 4, 16), weight), asked, strict=True)]
        if not any(asked):
            continue
        wanted = [t for t in given if t.requires_grad]
        got = torch.autograd.grad(OPERATORS[name].run(*given, EPS), wanted, outer)
        want = torch.autograd.grad(exact(name, *given), wanted, outer)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.emulate
@pytest.mark.parametrize(("name", "weight"), [("llama_rms_norm_times_silu", (72,)), ("rms_norm_of_gated", (2, 72))])
def test_kernels_on_the_emulator(name, weight, kernels):
    """One each way, and for a weight of groups another for its gradient."""
    given = drawn((5, 2, 72), weight, HALF)
    wide = [t.detach().double().requires_grad_() for t in given]
    outer = torch.randn(5, 2, 72).to(HALF)
    made, want = OPERATORS[name].run(*given, EPS), exact(name, *wide)
    torch.testing.assert_close(made.double(), want, rtol=0.02, atol=0.02)
    grads = [torch.autograd.grad(y, t, outer.to(y.dtype)) for y, t in ((made, given), (want, wide))]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.05, atol=0.05)
    assert kernels[f"{name}_training"] == [True]
    assert kernels[f"{name}_backward"] == [True] * len(weight)


def test_opcheck():
    x, gate, weight = (t.detach() for t in drawn((3, 64)))
    packet = lambda suffix: getattr(torch.ops.graphfuse, f"rms_norm_times_silu{suffix}").default  # noqa: E731
    y, inverse = packet("_training")(x, gate, weight, EPS)
    cases = [("", (x, gate, weight, EPS)), ("", (*drawn((3, 64)), EPS)), ("_training", (x, gate, weight, EPS))]
    cases.append(("_backward", (y, x, gate, weight, inverse, True, True, True)))
    for suffix, arguments in cases:
        assert set(torch.library.opcheck(packet(suffix), arguments).values()) == {"SUCCESS"}
