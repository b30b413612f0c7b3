"""Results and gradients of every operator against float64, in all types, shapes and strides."""

import itertools

import pytest
import torch

from support.training_calls import EPS, OPERATORS, WITHOUT_WEIGHT, check, close, gradients, grads, tensors, with_sum

TYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(64,), (1, 64), (5, 64), (2, 3, 48), (2, 1, 3, 17), (7, 1), (0, 64), (3, 0, 8)]


@pytest.mark.torch
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "weight"), [*itertools.product(OPERATORS, TYPES), *((n, False) for n in WITHOUT_WEIGHT)]
)
def test_types(name, weight, dtype):
    check(name, tensors(name, (33, 64), dtype, weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes(name, shape):
    check(name, tensors(name, shape))


@pytest.mark.parametrize("other", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "argument"), [(n, a) for n, o in OPERATORS.items() for a in ("residual", "gate") if a in o.tensors]
)
def test_types_of_their_own(name, argument, dtype, other):
    """Results and gradients have the types of what they belong to."""
    check(name, tensors(name, dtype={"x": dtype, argument: other}))


def in_other_strides(t):
    if t is None or t.dim() == 1:
        return t
    memory = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype).transpose(0, 1)
    return memory[..., 1::2].copy_(t.detach().transpose(0, 1)).transpose(0, 1).requires_grad_(t.requires_grad)


@pytest.mark.torch
@pytest.mark.parametrize("name", OPERATORS)
def test_strides(name):
    given = {n: in_other_strides(t) for n, t in tensors(name, (5, 3, 16)).items()}
    assert not given["x"].is_contiguous()
    check(name, given)


@pytest.mark.parametrize(
    "of", [lambda y: y.sum(), lambda y: y.mT.contiguous().mT.sum(0)[0, 0], lambda y: y[:, ::2].square().sum()]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_any_strides(name, of):
    given = tensors(name, (4, 6, 16), torch.float64)
    one = (torch.ones((), dtype=torch.float64),)
    got = gradients((sum(of(y) for y in OPERATORS[name].run(given)),), given, one)
    want = gradients((sum(of(y) for y in OPERATORS[name].exact(given)),), given, one)
    for n, g in want.items():
        torch.testing.assert_close(got[n], g, rtol=1e-10, atol=1e-10)


@pytest.mark.torch
@pytest.mark.parametrize("name", OPERATORS)
def test_only_gradients_that_are_needed(name):
    arguments = OPERATORS[name].tensors
    for asked in itertools.chain.from_iterable(itertools.combinations(arguments, k) for k in range(len(arguments) + 1)):
        given = {n: t.detach().requires_grad_(n in asked) for n, t in tensors(name).items()}
        if asked:
            check(name, given)
        else:
            assert not any(y.requires_grad for y in OPERATORS[name].run(given))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["add_rms_norm", "gemma_add_rms_norm"])
def test_one_of_two_results_used(name, dtype):
    for of in (0, 1):
        given = tensors(name, dtype={"x": dtype, "residual": torch.float32})
        made = OPERATORS[name].run(given)
        (outer,) = grads((made[of],))
        made[of].backward(outer)
        got = {n: t.grad for n, t in given.items()}
        wide = {n: t.detach().double().requires_grad_() for n, t in given.items()}
        wide = with_sum(OPERATORS[name], wide, made[1])
        OPERATORS[name].exact(wide)[of].backward(outer.double())
        for n, t in wide.items():
            if t.grad is None:
                assert got[n] is None or not got[n].any()
            else:
                assert got[n].dtype is given[n].dtype
                close(got[n], t.grad)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_training_changes_no_bit(name, dtype):
    given = tensors(name, (9, 96), dtype)
    training = OPERATORS[name].run(given)
    with torch.no_grad():
        inference = OPERATORS[name].run(given)
    assert all(y.grad_fn is not None for y in training) and not any(y.requires_grad for y in inference)
    assert all(torch.equal(a, b) for a, b in zip(training, inference, strict=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_two_steps_in_one(dtype):
    """add_rms_norm is rms_norm of torch's sum, forward and backward, bit by bit."""
    given = tensors("add_rms_norm", (9, 96), dtype)
    one = OPERATORS["add_rms_norm"].run(given)
    total = given["x"] + given["residual"]
    (norm,) = OPERATORS["rms_norm"].run({"x": total, "weight": given["weight"]})
    assert torch.equal(one[0], norm) and torch.equal(one[1], total)
    outer = grads((norm,))
    got, want = (gradients((y,), given, outer) for y in (one[0], norm))
    assert all(torch.equal(got[n], want[n]) for n in given)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64], ids=str)
def test_default_eps_is_torchs(dtype):
    """Of small rows it is all that counts."""
    from graphfuse.torch import rms_norm

    x = torch.full((2, 8), 1e-5).to(dtype)
    torch.testing.assert_close(rms_norm(x), torch.nn.functional.rms_norm(x, (8,)))
    assert not torch.allclose(rms_norm(x), rms_norm(x, eps=EPS))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_tensor_twice(name):
    """As x and as residual, gate or weight: gradients add up."""
    x = torch.randn(16, dtype=torch.float64, requires_grad=True)
    given = dict.fromkeys(OPERATORS[name].tensors, x)
    made, want = OPERATORS[name].run(given), OPERATORS[name].exact(given)
    outer = grads(made)
    (got,) = torch.autograd.grad(made, x, outer)
    (exact,) = torch.autograd.grad(want, x, outer)
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
