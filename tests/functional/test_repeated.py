"""Calls that are like earlier ones: planned once, compared and started; and when they are planned anew."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse import functional, fused_rmsnorm_silu
from graphfuse.contract.match import Pattern
from graphfuse.functional import problem
from graphfuse.functional.problem import plan
from graphfuse.planning import registry as plugins
from graphfuse.tuned_tables import store
from graphfuse.tuned_tables.entry import Source, TunedEntry
from support import toys
from support.functional_calls import NAMES, WITH_EPS, Tensors, call, check

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_is_planned_once(name):
    call(name, (11, 48)).run()
    before = plan.cache_info()
    for eps in (1e-5, 0.5, np.float32(0.5)):  # the last one takes the long way
        call(name, (11, 48)).run(**{"eps": eps} if name in WITH_EPS else {})
    assert plan.cache_info().misses == before.misses
    call(name, (12, 48)).run()
    assert plan.cache_info().misses == before.misses + 1


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm", "fused_rmsnorm_silu", "softmax"])
def test_modes_see_calls_that_are_repeated(name):
    function, x, weight = getattr(functional, name), torch.randn(3, 32), torch.ones(32)
    run = lambda x: function(x) if name == "softmax" else function(x, weight)  # noqa: E731
    for _ in range(3):
        run(x)
    seen = make_fx(run)(x)
    assert getattr(torch.ops.graphfuse, name).default in [node.target for node in seen.graph.nodes]
    assert torch.equal(seen(x + 1), run(x + 1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(run(x), FakeTensor)


@pytest.fixture
def no_long_way(monkeypatch):
    """no_long_way(): from now on no problem is looked up or planned."""
    return lambda: monkeypatch.setattr(problem, "plan", lambda *_: pytest.fail("the long way"))


@pytest.mark.parametrize("name", NAMES)
def test_the_short_way_is_taken_and_right(name, no_long_way):
    """With other memory, numbers and rows, in turns."""
    shapes = ((5, 64), (7, 64))
    for shape in shapes:
        call(name, shape).run()
    no_long_way()
    for seed in range(3):
        for shape in shapes:
            made = call(name, shape, tensors=Tensors(seed=seed))
            check(made.run(), made.exact)


def test_the_short_way_in_place(no_long_way):
    """One tensor as two arguments, and then as one."""
    weight, x = torch.randn(64), [torch.randn(5, 64) for _ in range(6)]
    wanted = [torch.nn.functional.rms_norm(t, (64,), weight, 1e-6) for t in x]
    functional.rmsnorm(x[0], weight, out=x[0])
    functional.qk_rmsnorm(x[1], x[2], weight, weight, 1e-6, x[1], x[2])
    no_long_way()
    assert functional.rmsnorm(x[3], weight, out=x[3]) is x[3]
    functional.qk_rmsnorm(x[4], x[5], weight, weight, 1e-6, x[4], x[5])
    for got, want in zip(x, wanted, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(pytest.fail.Exception, match="the long way"):
        functional.rmsnorm(x[3], weight, out=x[4])


def test_a_call_in_place_and_one_that_is_not():
    weight = torch.randn(64)
    for seed in range(4):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
        out, want = torch.empty(5, 64), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
        torch.testing.assert_close(functional.rmsnorm(x, weight, out=out), want)
        torch.testing.assert_close(functional.rmsnorm(x, weight, out=x), want)


def test_repeated_calls_are_like_first_ones():
    """One problem's key with other strides, alignments, classes, gradients and numbers."""

    def variants(seed):
        torch.manual_seed(seed)
        x, weight = torch.randn(4, 32), torch.randn(32)
        yield (x, weight), {}
        yield (torch.nn.Parameter(x), torch.nn.Parameter(weight)), {}
        yield (x, torch.randn(64)[::2]), {}
        yield (x, torch.randn(33)[1:]), {}
        yield (torch.randn(129)[1:].view(4, 32), weight), {}
        yield (x, weight), {"out": torch.empty(4, 40)[:, :32]}
        yield (x, weight), {"out": torch.empty(4, 32)}
        yield (x, weight), {"out": torch.empty(129)[1:].view(4, 32)}
        for eps in (1e-6, 0.5, 0.0, -0.0, 1, np.float32(0.25)):
            yield (x, weight), {"eps": eps}

    problems = fused_rmsnorm_silu.problems
    problems.clear()
    with torch.no_grad():
        for seed in range(3):
            for arguments, options in variants(seed):
                found = fused_rmsnorm_silu(*arguments, **options).clone()
                kept = dict(problems)
                problems.clear()
                assert torch.equal(found, fused_rmsnorm_silu(*arguments, **options))
                problems |= kept
    assert problems


def entry(number: int) -> TunedEntry:
    """One of another engine: that something is tuned is all that counts here."""
    return TunedEntry(Source("user", "a device", "sm_90"), "nobody", {"number": number}, 1, {})


def test_problems_are_planned_anew_when_something_is_tuned(tmp_path):
    """By this process, and by others once a file of theirs is read; calls before and after give the same."""
    file = tmp_path / "tuned.json"

    def planned() -> int:
        """How many problems a call has to plan."""
        before = plan.cache_info().misses
        made = call("rmsnorm", (13, 48))
        check(made.run(), made.exact)
        return plan.cache_info().misses - before

    planned()
    assert planned() == 0
    assert store.add(file, [entry(1)]) and planned() == 1 and planned() == 0
    assert store.read(file) and planned() == 0  # what it says first is nothing new
    other = tmp_path / "other.json"
    assert store.add(other, [entry(2)]) and planned() == 1
    other.replace(file)  # as another process does
    assert planned() == 0 and store.read(file) and planned() == 1 and planned() == 0
    assert store.read(file) and planned() == 0
    file.unlink()
    assert not store.read(file) and planned() == 1
    assert not store.read(file) and planned() == 0


def test_problems_with_a_workspace(monkeypatch, no_long_way):
    """Cut in parts, whose tensors lie in a workspace that each call brings along."""

    def norm(g):
        return {"out": g.rmsnorm(g.capture("x"), g.capture("w"), g.capture("e"))[0]}

    patterns = (Pattern("solo_rmsnorm", norm, toys.facts), *toys.solo("swish", "mul"))
    monkeypatch.setattr(plugins, "installed", lambda: plugins.Registry(patterns, (toys.HostSolo(),)))
    planned = []
    monkeypatch.setattr(problem, "plan", lambda *a: planned.append(plan.__wrapped__(*a)) or planned[-1])
    functional.rmsnorm_silu_gate.problems.clear()
    made = call("rmsnorm_silu_gate", (21, 64))
    check(made.run(), made.exact)
    assert planned[0].workspace_bytes
    no_long_way()
    for seed in range(3):
        made = call("rmsnorm_silu_gate", (21, 64), tensors=Tensors(seed=seed))
        check(made.run(), made.exact)


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
@pytest.mark.parametrize("name", ["rmsnorm", "fused_add_rmsnorm"])
def test_no_tensor_is_kept_alive(name, device, plan_on):
    """Of calls whose fast path is kept."""
    plan_on(device)
    made = call(name, (6, 80), tensors=Tensors(seed=7))
    left = [weakref.ref(t) for t in made.run().values() if isinstance(t, torch.Tensor)]
    assert len(left) >= 2 and getattr(functional, name).problems
    del made
    gc.collect()
    assert not [reference for reference in left if reference() is not None]
