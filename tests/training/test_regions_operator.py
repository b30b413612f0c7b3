"""The operator of regions and its functions: values, gradients, and what torch transforms."""

import pytest
import torch

from graphfuse.base.errors import GraphNotSupportedError, VariantPackError
from graphfuse.functional import problem
from graphfuse.torch.regions import operator
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.operator import RegionOperator, region
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from support.regions import FULL, HALF, PROGRAM, C, T, own, rows

pytestmark = pytest.mark.torch


def test_the_operator():
    x, w = rows(FULL), rows(HALF, 1, (C,))
    for one, other in zip(region([x, w], PROGRAM.text), own(x, w), strict=True):
        torch.testing.assert_close(one, other)
    x.requires_grad_()
    w.requires_grad_()
    grads = [rows(HALF, 2), rows(FULL, 3, (T,))]
    got = torch.autograd.grad(region([x, w], PROGRAM.text), [x, w], grads)
    torch.testing.assert_close(got, torch.autograd.grad(own(x, w), [x, w], grads), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("way", [region, lambda given, text: [RegionOperator.of(text).run(*given)]])
def test_a_program_without_gradients(way):
    steps = (
        ProgramStep("reduction", {"input": "in0"}, {"mode": "AVG"}),
        ProgramStep("cmp_gt", {"input": "in0", "comparison": "@0"}),
    )
    text = Program((RegionInput("in0", "nn", "FLOAT"),), steps, (Result(1, "nn", "FLOAT"),)).text
    for x in (rows(FULL), rows(FULL).requires_grad_()):
        (mask,) = way([x], text)
        assert torch.equal(mask, (x > x.mean(-1, keepdim=True)).float()) and not mask.requires_grad


def test_gradients_without_a_rule_are_refused_where_they_are_asked_for():
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "FLOAT")
    steps = (
        ProgramStep("gelu_backward", {"loss": "in0", "input": "in1"}),
        ProgramStep("reduction", {"input": "@0"}, {"mode": "ADD"}),
    )
    text = Program(inputs, steps, (Result(1, "n-", "FLOAT"),)).text
    for call in (RegionOperator.of(text).run, lambda *given: region(given, text)[0]):
        assert call(rows(FULL), rows(FULL, 1)).shape == (T,)
        with pytest.raises(GraphNotSupportedError, match="the gradient of a gradient is not offered"):
            call(rows(FULL), rows(FULL, 1).requires_grad_())


def test_a_function_of_a_program():
    """It returns what the operator does, also where a mode sees the operator in its place, and for other tensors."""
    run = RegionOperator.of(PROGRAM.text).run
    grads = [rows(HALF, 2), rows(FULL, 3, (T,))]
    for _ in range(3):
        x, w = rows(FULL).requires_grad_(), rows(HALF, 1, (C,)).requires_grad_()
        found = []
        for made in (run(x, w), region([x, w], PROGRAM.text), observed(lambda: run(x, w))):
            found.append([*made, *torch.autograd.grad(made, [x, w], grads)])
        for one in found[1:]:
            assert all(map(torch.equal, found[0], one))
        assert run(x, w)[0].grad_fn.name() == "regionBackward"
        with torch.no_grad():
            for made in (run(x, w), region([x, w], PROGRAM.text), observed(lambda: run(x, w))):
                assert all(map(torch.equal, made, found[0]))
    with pytest.raises(VariantPackError, match=r"in1 has shape \(3,\); accepted: \(32,\)"):
        run(x, w[:3])
    y, total = run(x.detach().to("meta"), w.detach().to("meta"))
    assert y.is_meta and total.shape == (T,)


def observed(function):
    """What a function returns while a mode hears of what it calls: one operator of ours."""

    class Heard(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    heard = []
    with Heard():
        made = function()
    assert len([name for name in heard if name.startswith("graphfuse.region")]) == 1
    return made


def test_results_that_nobody_uses():
    """Gradients by way of each of three results alone: what it does not depend on has none."""
    steps = (
        ProgramStep("reduction", {"input": "in1"}, {"mode": "ADD"}),
        ProgramStep("mul", {"a": "in0", "b": "in0"}),
        ProgramStep("mul", {"a": "@1", "b": "@0"}),
    )
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "FLOAT")
    text = Program(inputs, steps, (Result(0, "n-", "FLOAT"), Result(1, "nn", "FLOAT"), Result(2, "nn", "FLOAT"))).text

    def of_torch(x, y):
        return y.sum(-1), x * x, x * x * y.sum(-1, keepdim=True)

    for used in range(3):
        found = []
        for function in (RegionOperator.of(text).run, of_torch):
            x, y = rows(FULL).requires_grad_(), rows(FULL, 1).requires_grad_()
            found.append(torch.autograd.grad(function(x, y)[used].sum(), [x, y], allow_unused=True))
        for got, want in zip(*found, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want)


SUM = Program(
    (RegionInput("in0", "nn", "BFLOAT16"), RegionInput("in1", "nn", "BFLOAT16"), RegionInput("in2", "nn", "FLOAT")),
    (
        ProgramStep("add", {"a": "in0", "b": "in1"}, {}, "BFLOAT16"),
        ProgramStep("add", {"a": "@0", "b": "in2"}),
        ProgramStep("mul", {"a": "@1", "b": "@1"}),
        ProgramStep("reduction", {"input": "@2"}, {"mode": "AVG"}),
    ),
    (Result(0, "nn", "BFLOAT16"), Result(1, "nn", "FLOAT"), Result(3, "n-", "FLOAT")),
)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_terms_of_a_sum_have_one_gradient(used, monkeypatch):
    """It is written once for each type; where it is that of a result, it is not written at all."""
    asked, entry = [], operator.entry
    monkeypatch.setattr(operator, "entry", lambda f, dispatched: counted(f, entry(f, dispatched), asked))
    run = RegionOperator(RegionGraphs(SUM)).run

    def of_torch(x, y, z):
        total = x + y
        return total, total + z, (total + z).square().mean(-1)

    for needed in ((0, 1, 2), (1,), (2,), (0, 2)):
        found = []
        for function in (run, of_torch):
            given = [rows(HALF), rows(HALF, 1), rows(FULL, 2)]
            wanted = [given[n].requires_grad_() for n in needed]
            results = function(*given)
            made = [results[n] for n in used if results[n].requires_grad]
            if made:
                outer = [rows(t.dtype, 3, t.shape) for t in made]
                found.append(torch.autograd.grad(made, wanted, outer, materialize_grads=True))
        for got, want in zip(*found, strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    assert all(sum(flags) <= 2 for flags in asked) and bool(asked) == (used not in ((0,), (1,)))


def counted(f, function, asked):
    """A function that logs which gradients are asked for; its fast paths do not."""

    def call(*values):
        if f.options:
            asked.append(values[-len(f.options) :])
        return function(*values)

    call.last = lambda: None
    return call


def test_results_of_other_extents_than_what_they_are_made_of():
    """Gradients that are one number after the other, and not of one shape."""
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "n1", "FLOAT"), RegionInput("in2", "n-", "FLOAT")
    steps = (
        ProgramStep("add", {"a": "in1", "b": "in2"}),
        ProgramStep("add", {"a": "in0", "b": "@0"}),
    )
    text = Program(inputs, steps, (Result(0, "n-", "FLOAT"), Result(1, "nn", "FLOAT"))).text
    for used in ((0,), (1,), (0, 1)):
        found = []
        for function in (RegionOperator.of(text).run, lambda x, a, b: (a[:, 0] + b, x + a + b[:, None])):
            given = [
                rows(FULL).requires_grad_(),
                rows(FULL, 1, (T, 1)).requires_grad_(),
                rows(FULL, 2, (T,)).requires_grad_(),
            ]
            results = function(*given)
            made = [results[n] for n in used]
            outer = [rows(FULL, 3, t.shape) for t in made]
            found.append(torch.autograd.grad(made, given, outer, materialize_grads=True))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


def test_other_ways_of_differentiating_are_refused():
    x, w = rows(FULL), rows(HALF, 1, (C,))
    run = lambda x: RegionOperator.of(PROGRAM.text).run(x, w)[0].float()  # noqa: E731
    for call in (run, lambda x: region([x, w], PROGRAM.text)[0].float()):
        with pytest.raises(GraphNotSupportedError, match="graphfuse::region is differentiated by torch.func"):
            torch.func.grad(lambda x: call(x).sum())(x)
        with pytest.raises(GraphNotSupportedError, match="graphfuse::region has no forward-mode derivative"):
            torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("create_graph", [False, True])
def test_batches_of_gradients(create_graph):
    """As torch.autograd.functional.jacobian(vectorize=True) makes them, by a vmap that is not torch.func's."""
    for asked in ((True, True), (True, False), (False, True)):
        given = [rows(FULL).requires_grad_(asked[0]), rows(HALF, 1, (C,)).requires_grad_(asked[1])]
        made = [t for t in RegionOperator.of(PROGRAM.text).run(*given) if t.requires_grad]
        inputs, outer = [t for t in given if t.requires_grad], [rows(t.dtype, 2, (3, *t.shape)) for t in made]
        want = [torch.autograd.grad(made, inputs, one, retain_graph=True) for one in zip(*outer, strict=True)]
        got = torch.autograd.grad(made, inputs, outer, is_grads_batched=True, create_graph=create_graph)
        assert all(torch.equal(g, torch.stack(each)) for g, each in zip(got, zip(*want, strict=True), strict=True))


def test_vmap():
    x, w = rows(FULL, shape=(3, T, C)).requires_grad_(), rows(HALF, 1, (3, C))
    run = RegionOperator.of(PROGRAM.text).run
    for call in (run, lambda x, w: region([x, w], PROGRAM.text)):
        for given, dims in (((x, w), 0), ((x.movedim(0, 1), w[0]), (1, None)), ((x, w[0]), (0, None))):
            got = torch.func.vmap(lambda x, w: call(x, w)[0], dims)(*given)
            want = torch.stack([own(x[n], w[n] if given[1] is w else w[0])[0] for n in range(3)])
            torch.testing.assert_close(got, want)
            for a, b in zip(*(torch.autograd.grad(y.float().sin().sum(), x) for y in (got, want)), strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)
    with pytest.raises(VariantPackError, match="mapped over 0 samples"):
        torch.func.vmap(lambda x: run(x, w[0])[1])(x[:0])


@pytest.mark.parametrize("gradients", [False, True])
def test_opcheck(gradients):
    tensors = [rows(FULL).requires_grad_(gradients), rows(HALF, 1, (C,)).requires_grad_(gradients)]
    torch.library.opcheck(region, (tensors, PROGRAM.text), rtol=0.02, atol=0.05)


def test_fake_tensors_of_any_number_of_rows():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(rows(FULL), symbolic_context=context)
    w = mode.from_tensor(rows(HALF, 1, (C,)), static_shapes=True)
    y, total = region([x, w], PROGRAM.text)
    assert y.shape == x.shape and total.shape == x.shape[:1] and y.dtype is HALF
    assert not mode.shape_env.guards
    y, total = region([rows(FULL).to("meta"), rows(HALF, 1, (C,)).to("meta")], PROGRAM.text)
    assert y.is_meta and tuple(total.shape) == (T,)


@pytest.mark.emulate
def test_one_plan_for_a_class_of_row_counts(plan_on):
    plan_on("emulator")
    w, before = rows(HALF, 1, (C,)), problem.plan.cache_info().misses
    for count in (600, 640, 601):
        x = rows(FULL, count, (count, C))
        for one, other in zip(region([x, w], PROGRAM.text), own(x, w), strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
    assert problem.plan.cache_info().misses - before == 1
