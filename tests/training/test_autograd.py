"""What autograd keeps and hands over: memory, hooks, versions, checkpoints, autocast."""

import functools
from collections import Counter

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from graphfuse import torch as training
from graphfuse.engines.reference import ReferenceEngine
from support.training_calls import OPERATORS, gradients, grads, tensors

pytestmark = pytest.mark.torch


def kept(function) -> Counter:
    """Bytes and types of the tensors that are saved for backward while function runs."""
    found = []
    with saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        function()
    return Counter((t.dtype, t.untyped_storage().nbytes()) for t in found)


def expected(name, made, given) -> Counter:
    found = given | dict(zip(("y", "total"), made, strict=False))
    tensors = [found[n] for n in OPERATORS[name].kept]
    rows = made[0].numel() // made[0].shape[-1]
    statistics = [(torch.float32, 4 * rows)] * OPERATORS[name].statistics
    return Counter([*((t.dtype, t.untyped_storage().nbytes()) for t in tensors), *statistics])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_kept(name, dtype):
    """The normalized tensor, weight and gate as they are, and four bytes a row, eight for a layer norm."""
    given, made = tensors(name, (6, 128), dtype), []
    found = kept(lambda: made.extend(OPERATORS[name].run(given)))
    assert found == expected(name, made, given)
    with torch.no_grad():
        assert not kept(lambda: OPERATORS[name].run(given))


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_kept_when_compiled(name):
    given, made = tensors(name, (6, 128), torch.bfloat16), []
    torch._dynamo.reset()
    fast = torch.compile(OPERATORS[name].run, fullgraph=True, backend="aot_eager")
    fast(given)
    found = kept(lambda: made.extend(fast(given)))
    assert found == expected(name, made, given)


@pytest.mark.parametrize("name", OPERATORS)
def test_hooks_that_move_what_is_kept(name):
    given = tensors(name)
    made = OPERATORS[name].run(given)
    with save_on_cpu():
        moved = OPERATORS[name].run(given)
    want, got = (gradients(y, given, grads(y)) for y in (made, moved))
    assert all(torch.equal(got[n], want[n]) for n in given)


@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_kept_is_overwritten(name):
    """Backward twice, and of two calls that share tensors: the same bits."""
    given = tensors(name)
    before = {n: t.detach().clone() for n, t in given.items()}
    one, two = (OPERATORS[name].run(given) for _ in range(2))
    copies, outer = [y.detach().clone() for y in one], grads(one)
    found = [
        dict(zip(given, torch.autograd.grad(y, [*given.values()], outer, retain_graph=True), strict=True))
        for y in (one, two, one)
    ]
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in given)
    assert all(torch.equal(t, before[n]) for n, t in given.items())
    assert all(torch.equal(y, c) for y, c in zip(one, copies, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(two, [*given.values()], outer)
        torch.autograd.grad(two, [*given.values()], outer)


@pytest.mark.parametrize("name", OPERATORS)
def test_changing_what_is_kept_is_torchs_error(name):
    for changed in (*OPERATORS[name].tensors, "total"):
        given = {n: t * 1 for n, t in tensors(name).items()}  # no leaves, which may not be changed in place
        made = OPERATORS[name].run(given)
        tensor = dict(zip(("y", "total"), made, strict=False)).get(changed) if changed == "total" else given[changed]
        if tensor is None:
            continue
        with torch.no_grad():
            tensor.mul_(2)
        if changed in OPERATORS[name].kept:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(made, given, grads(made))
        else:
            gradients(made, given, grads(made))


@pytest.mark.parametrize("name", OPERATORS)
def test_nodes_are_called_as_their_operators(name):
    assert OPERATORS[name].run(tensors(name))[0].grad_fn.name() == f"{name}Backward"


@pytest.mark.parametrize("name", OPERATORS)
def test_results_may_be_changed(name):
    given = tensors(name)
    want = gradients(OPERATORS[name].run(given)[:1], given, grads(OPERATORS[name].run(given)[:1]))
    y = OPERATORS[name].run(given)[0]
    outer = grads((y,))
    y += 1
    got = gradients((y,), given, outer)
    assert all(torch.equal(got[n], want[n]) for n in given)


def test_gradients_of_terms_are_memory_of_their_own():
    """What a user does to one of them in place leaves the other alone."""
    given = tensors("add_rms_norm")
    y, total = OPERATORS["add_rms_norm"].run(given)
    (y.sum() + total.sum()).backward()
    x, residual = given["x"].grad, given["residual"].grad
    assert torch.equal(x, residual) and x.data_ptr() != residual.data_ptr()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_accumulate(set_to_none):
    module = training.RMSNorm(64)
    x = torch.randn(5, 64)
    module(x).sum().backward()
    one = module.weight.grad.clone()
    module(x).sum().backward()
    assert torch.equal(module.weight.grad, 2 * one)
    module.zero_grad(set_to_none)
    module(x).sum().backward()
    assert torch.equal(module.weight.grad, one)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_batches_of_gradients(name, create_graph):
    """As torch.autograd.functional.jacobian(vectorize=True) makes them, by a vmap that is not torch.func's."""
    for asked in ([*OPERATORS[name].tensors], ["weight"], ["x"]):
        given = {n: t.requires_grad_(n in asked) for n, t in tensors(name, grad=False).items()}
        made = [y for y in OPERATORS[name].run(given) if y.requires_grad]
        outer = [torch.randn(3, *y.shape) for y in made]
        inputs = [given[n] for n in asked]
        want = [torch.autograd.grad(made, inputs, one, retain_graph=True) for one in zip(*outer, strict=True)]
        got = torch.autograd.grad(made, inputs, outer, is_grads_batched=True, create_graph=create_graph)
        for g, each in zip(got, zip(*want, strict=True), strict=True):
            torch.testing.assert_close(g, torch.stack(each), rtol=1e-5, atol=1e-5)


@pytest.fixture
def runs(monkeypatch, plan_on):
    """Names of the graphs that the reference engine runs from now on."""
    plan_on("cpu")  # anew: plans keep what they run
    found, run = [], ReferenceEngine.run
    monkeypatch.setattr(
        ReferenceEngine, "run", lambda self, facts, *rest: found.append(facts.graph.name) or run(self, facts, *rest)
    )
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_one_graph_each_way(name, runs):
    given = tensors(name, (11, 64))
    for _ in range(2):
        made = OPERATORS[name].run(given)
        gradients(made, given, grads(made))
        with torch.no_grad():
            OPERATORS[name].run(given)
    assert runs == [f"{name}_training", f"{name}_backward", name] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_checkpoint(name, use_reentrant, runs):
    given = tensors(name)
    order = OPERATORS[name].tensors
    made = OPERATORS[name].run(given)
    want = gradients(made, given, outer := grads(made))
    runs.clear()

    def function(*values):
        return OPERATORS[name].run(dict(zip(order, values, strict=True)))

    found = checkpoint(function, *given.values(), use_reentrant=use_reentrant)
    assert all(torch.equal(a, b) for a, b in zip(found, made, strict=True))
    torch.autograd.backward(found, outer)
    assert all(torch.equal(t.grad, want[n]) for n, t in given.items())
    first = name if use_reentrant else f"{name}_training"
    assert runs == [first, f"{name}_training", f"{name}_backward"]


def test_selective_checkpoint(runs):
    """A policy can keep what the norm made, so that only the rest is computed again."""
    given = tensors("rms_norm")
    weight = torch.randn(64, 64, requires_grad=True)

    def function(x, w):
        return (training.rms_norm(x, w) @ weight).relu()

    step = torch.ops.graphfuse.rms_norm_training.default
    contexts = functools.partial(create_selective_checkpoint_contexts, [step])
    y = checkpoint(function, *given.values(), use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(y.square().sum(), (*given.values(), weight))
    assert runs == ["rms_norm_training", "rms_norm_backward"]
    want = torch.autograd.grad(function(*given.values()).square().sum(), (*given.values(), weight))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing(name, dtype):
    """They compute in float32 anyway; results keep their arguments' types, gradients too."""
    given = tensors(name, (4, 64), dtype, torch.float32)
    made = OPERATORS[name].run(given)
    want = gradients(made, given, outer := grads(made))
    with torch.autocast("cpu", torch.bfloat16):
        found = OPERATORS[name].run(given)
    got = gradients(found, given, outer)
    assert all(torch.equal(a, b) for a, b in zip(found, made, strict=True))
    assert all(torch.equal(got[n], want[n]) and got[n].dtype is given[n].dtype for n in given)


def test_a_block_under_autocast():
    """float32 weights, bfloat16 matrix products between."""
    block = torch.nn.Sequential(training.RMSNorm(64), torch.nn.Linear(64, 32), training.RMSNormSiLU(32))
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.abs().sum() > 0 for p in (x, *block.parameters()))
