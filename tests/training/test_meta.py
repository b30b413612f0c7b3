"""Tensors on the meta device: every function, operator and module says what it would return, as torch's norms do."""

import pytest
import torch

import graphfuse
from graphfuse import functional
from graphfuse import torch as training
from support.functional_calls import NAMES, call
from support.training_calls import OPERATORS, tensors

pytestmark = pytest.mark.torch

MODULES = {
    training.RMSNorm: torch.nn.RMSNorm,
    training.RMSNormSiLU: torch.nn.RMSNorm,
    training.LayerNorm: torch.nn.LayerNorm,
}


def looks(t):
    return t.shape, t.dtype, t.stride(), t.requires_grad


def as_meta(t):
    return t.detach().to("meta").requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t


@pytest.mark.parametrize("name", NAMES)
def test_functions(name):
    real, meta = call(name), call(name)
    for argument in meta.tensors:
        meta.tensors[argument] = as_meta(meta.tensors[argument])
    want, made = real.run(), meta.run()
    for argument in real.returned:
        assert made[argument].is_meta and looks(made[argument]) == looks(want[argument])


def test_an_output_that_is_given():
    x, weight, out = (torch.empty(s, device="meta") for s in ((4, 64), (64,), (4, 64)))
    assert functional.rmsnorm(x, weight, out=out) is out


def test_losses():
    x, target = torch.randn(4, 6, 64, requires_grad=True), torch.zeros(4, 6, dtype=torch.int64)
    for function in (functional.cross_entropy, training.cross_entropy):
        given = (x.detach(), target) if function is functional.cross_entropy else (x, target)
        want, made = function(*given), function(*map(as_meta, given))
        assert [*map(looks, made)] == [*map(looks, want)] if isinstance(want, tuple) else looks(made) == looks(want)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_gradients(name, grad):
    real = tensors(name, (3, 4, 64), torch.bfloat16, torch.float32, grad=grad)
    meta = {n: as_meta(t) for n, t in real.items()}
    made = OPERATORS[name].run(meta)
    assert [looks(y) for y in made] == [looks(y) for y in OPERATORS[name].run(real)]
    if grad:
        torch.autograd.backward(made, [torch.empty_like(y) for y in made])
        assert all(t.grad.is_meta and looks(t.grad) == looks(t.grad.new_empty(t.shape)) for t in meta.values())


@pytest.mark.parametrize("function", [training.softmax, training.log_softmax, training.normalize])
def test_other_operators(function):
    x = torch.empty(3, 64, device="meta", requires_grad=True)
    y = function(x)
    y.sum().backward()
    assert y.is_meta and y.shape == x.shape and x.grad.is_meta


@pytest.mark.parametrize("kind", MODULES)
def test_modules_as_torchs(kind):
    mine, torchs = (k((4, 16), device="meta", dtype=torch.bfloat16) for k in (kind, MODULES[kind]))
    for grad in (False, True):
        x = torch.empty(3, 4, 16, device="meta", dtype=torch.bfloat16)
        with torch.set_grad_enabled(grad):
            assert mine(x).is_meta and looks(mine(x)) == looks(torchs(x))
    for module in (mine, torchs):
        module(x).sum().backward()
    assert [looks(p.grad) for p in mine.parameters()] == [looks(p.grad) for p in torchs.parameters()]


def test_the_sum_and_its_norm():
    norm = training.AddRMSNorm(64, device="meta")
    x, residual = torch.empty(2, 64, device="meta", dtype=torch.bfloat16), torch.empty(2, 64, device="meta")
    assert [(y.dtype, y.is_meta) for y in norm(x, residual)] == [(torch.bfloat16, True), (torch.float32, True)]


def test_what_does_not_fit_is_refused_as_anywhere():
    x = torch.empty(4, 64, device="meta")
    with pytest.raises(graphfuse.VariantPackError, match=r"weight has shape \(32,\); accepted: \(64,\)"):
        training.rms_norm(x, torch.empty(32, device="meta"))
    with pytest.raises(graphfuse.VariantPackTypeError, match="x is of torch.int64"):
        training.rms_norm(x.long())
    with pytest.raises(graphfuse.VariantPackError, match="weight is on cpu, x is on meta; one device is accepted"):
        training.rms_norm(x, torch.ones(64))
