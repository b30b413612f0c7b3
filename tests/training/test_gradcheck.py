"""torch.autograd.gradcheck of every operator and option, in float64 through the reference engine."""

import pytest
import torch

from support.training_calls import OPERATORS, WITHOUT_WEIGHT, tensors, with_sum

SHAPES = [(5,), (3, 6), (2, 1, 4), (4, 1)]


def check(name, given, of=slice(None), eps=None):
    """of: the results that are used."""
    names = [n for n, t in given.items() if t is not None]

    def function(*values):
        return OPERATORS[name].run(given | dict(zip(names, values, strict=True)), eps)[of]

    assert torch.autograd.gradcheck(function, [given[n] for n in names])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes(name, shape):
    check(name, tensors(name, shape, torch.float64))


@pytest.mark.parametrize("name", WITHOUT_WEIGHT)
def test_without_a_weight(name):
    check(name, tensors(name, (3, 6), torch.float64, weight=False))


@pytest.mark.parametrize("eps", [1e-6, 0.1, 3])
@pytest.mark.parametrize("name", OPERATORS)
def test_eps(name, eps):
    check(name, tensors(name, (3, 6), torch.float64), eps=eps)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "asked"), [(n, a) for n, o in OPERATORS.items() for a in o.tensors])
def test_one_gradient(name, asked):
    given = tensors(name, (3, 6), torch.float64, grad=False)
    given[asked].requires_grad_()
    check(name, given)


@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("name", ["add_rms_norm", "gemma_add_rms_norm"])
def test_one_result(name, of):
    check(name, tensors(name, (3, 6), torch.float64), slice(of, of + 1), eps=0.01)


@pytest.mark.parametrize("name", OPERATORS)
def test_strides(name):
    def turned(t):
        return t.detach().mT.contiguous().mT.requires_grad_() if t.dim() > 1 else t

    check(name, {n: turned(t) for n, t in tensors(name, (3, 6), torch.float64).items()})


@pytest.mark.parametrize(("name", "wide"), [(n, a) for n, o in OPERATORS.items() for a in o.tensors])
def test_one_tensor_in_float64(name, wide):
    """Its gradient is as exact as its type."""
    given = {n: t.to(torch.float64 if n == wide else torch.float32).detach() for n, t in tensors(name).items()}
    given[wide].requires_grad_()
    exact = {n: t.detach().double() for n, t in given.items()}
    if "residual" in given:  # the sum is returned, and normalized, in residual's type
        exact = with_sum(OPERATORS[name], exact, OPERATORS[name].run(given)[1])
    exact[wide].requires_grad_()
    (got,), (want,) = (
        torch.autograd.grad(f(t)[0].double().sum(), t[wide])
        for f, t in ((OPERATORS[name].run, given), (OPERATORS[name].exact, exact))
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_float64_is_computed_in_float64():
    given = tensors("rms_norm", (4, 64), torch.float64)
    (got,), (want,) = OPERATORS["rms_norm"].run(given), OPERATORS["rms_norm"].exact(given)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
