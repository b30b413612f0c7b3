"""Dropout in compiled graphs: regions have it, and backward drops what forward has dropped."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphfuse.torch import compile_report
from graphfuse.torch.analysis import cost
from support.compiled import became

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
COLUMNS, RATE = 48, 0.25


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """What is for GPUs alone, on the CPU."""
    monkeypatch.setattr(cost, "DEVICE", "cpu")


def behind(x, r, w):
    return F.dropout(F.rms_norm(x, (COLUMNS,), w), RATE) + r


def before(x, r, w):
    total = r + F.dropout(x, RATE)
    return F.rms_norm(total, (COLUMNS,), w), total


def twice(x, r, w):
    return F.dropout(F.rms_norm(F.dropout(x, p=RATE) + r, (COLUMNS,), w), RATE)


def checkpointed(x, r, w):
    return checkpoint(twice, x, r, w, use_reentrant=False)


def module(x, r, w):
    return torch.nn.Dropout(RATE)(F.layer_norm(x, (COLUMNS,), w)) * r


def operands(*leading):
    source = torch.Generator().manual_seed(len(leading))
    shapes = ((*leading, COLUMNS), (*leading, COLUMNS), (COLUMNS,))
    return [(torch.randn(s, generator=source) + 3).requires_grad_() for s in shapes]


def compiled(function, **options):
    options = {"decline": False} | options
    return torch.compile(function, backend="graphfuse", options=options)


def has_dropout():
    return any("dropout" in e.why for e in compile_report().graphs[-1].entries)


def called(function, tensors, seed=0):
    torch.manual_seed(seed)
    made = function(*tensors)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("function", [behind, before, twice, checkpointed, module])
@pytest.mark.parametrize("leading", [(6,), (2, 5)])
def test_gradients_are_of_what_was_dropped(function, leading):
    """By differences: with the same key the same elements are dropped, whatever the values are."""
    run, tensors = compiled(function), operands(*leading)
    made = called(run, tensors)
    assert became() == ["region"] and has_dropout()
    grads = [torch.randn(t.shape, generator=torch.Generator().manual_seed(7)) for t in made]
    found = torch.autograd.grad(made, tensors, grads)
    step, source = 2.0**-6, torch.Generator().manual_seed(8)
    for k, grad in enumerate(found):
        along = torch.randn(grad.shape, generator=source)
        ends = []
        for sign in (1, -1):
            moved = [t.detach().clone() for t in tensors]
            moved[k] += sign * step * along
            moved = [t.requires_grad_() for t in moved]  # else torch refuses random numbers in checkpoints
            ends.append(
                sum((one * g).detach().double().sum() for one, g in zip(called(run, moved), grads, strict=True))
            )
        numeric = (ends[0] - ends[1]) / (2 * step)
        assert abs(numeric - (grad * along).double().sum()) <= 2e-2 * (grad * along).abs().double().sum()


@pytest.mark.parametrize("function", [behind, before, twice])
def test_each_call_drops_others_and_a_seed_the_same(function):
    run, tensors = compiled(function), operands(40)
    first, again, other = (called(run, tensors, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    torch.manual_seed(1)
    run(*tensors)
    assert not torch.equal(called(lambda *t: run(*t), tensors, 2)[0], first[0])


def test_as_many_are_dropped_as_asked_for():
    x, _, w = (t.detach() for t in operands(400))
    run = compiled(lambda x, w: F.dropout(F.rms_norm(x, (COLUMNS,), w), RATE))
    made, plain = run(x, w), F.rms_norm(x, (COLUMNS,), w)
    kept = made != 0
    assert abs(kept.double().mean() - (1 - RATE)) < 4 * (RATE * (1 - RATE) / made.numel()) ** 0.5
    torch.testing.assert_close(made[kept], (plain / (1 - RATE))[kept])


def test_numbers_of_rows_that_vary():
    run = torch.compile(behind, backend="graphfuse", options={"decline": False}, dynamic=True)
    for n in (3, 8, 21):
        tensors = operands(n)
        made = called(run, tensors)
        torch.autograd.grad(made, tensors, [torch.ones_like(t) for t in made])
    assert became() == ["region"]


LEFT = {
    "its own random numbers": (behind, {"fallback_random": True}),
    "another backend": (behind, {"then": "aot_eager"}),
}


@pytest.mark.parametrize("what", LEFT)
def test_where_random_numbers_are_eagers(what):
    function, options = LEFT[what]
    tensors = operands(6)
    made = called(compiled(function, **options), tensors)
    torch.testing.assert_close(made, called(function, tensors))
    assert not has_dropout()


def test_a_dropout_that_no_region_has_is_what_it_was():
    def product(x, r, w):
        return F.dropout(x, RATE) @ r.mT, F.rms_norm(x, (COLUMNS,), w)

    tensors = operands(6)
    run, plain = compiled(product), torch.compile(product, backend="inductor")
    torch.testing.assert_close(called(run, tensors), called(plain, tensors))
    assert became() == ["region"] and not has_dropout()


@pytest.mark.parametrize("rate, training", [(0.0, True), (RATE, False), (1.0, True)])
def test_rates_that_drop_nothing_or_all(rate, training):
    def function(x, w):
        return F.dropout(F.rms_norm(x, (COLUMNS,), w), rate, training)

    x, _, w = (t.detach() for t in operands(6))
    torch.testing.assert_close(compiled(function)(x, w), function(x, w))
