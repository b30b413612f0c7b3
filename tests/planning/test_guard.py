"""Whatever a plug-in raises or returns wrongly: one that was passed raises, an installed one is left out."""

import dataclasses
import importlib
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch

from graphfuse import (
    GraphfuseError,
    GraphNotSupportedError,
    PluginError,
    build_plan_policy,
    data_type,
    functional,
    heur_mode,
)
from graphfuse.codegen.render import render
from graphfuse.contract.engine import Address, Constant, KernelEngine, Launch, No
from graphfuse.contract.match import Pattern
from graphfuse.engines import ALL as ENGINES
from graphfuse.patterns import ALL as PATTERNS
from graphfuse.planning import guard
from graphfuse.planning import registry as plugins
from support import graphs, toys

EXTRA = plugins.Origin("extra-plugin", "1.0")


def boom(*arguments, **named):
    raise KeyError("oops")


def leave(*arguments, **named):
    raise SystemExit(3)


def answer(value):
    return lambda *arguments, **named: value


@dataclass
class Melting:
    """Not frozen, and so not hashable."""

    subgraph: object


@dataclass(frozen=True)
class Unhashable:
    names: list


@dataclass(frozen=True)
class Unserved:
    subgraph: object


def template(g):
    return {"out": g.relu(g.capture("a"))}


def norm(g):
    return {"out": g.rmsnorm(g.capture("x"), g.capture("scale"), g.capture("epsilon"))[0]}


def unknown_op(g):
    return {"out": g.softmaxx(g.capture("a"))}


def pattern(**changes) -> Pattern:
    return dataclasses.replace(Pattern("own", template, toys.facts), **changes)


def engine(**changes) -> toys.HostSolo:
    """A good engine of name "own", but for these methods."""
    return type("Own", (toys.HostSolo,), {k: staticmethod(v) for k, v in changes.items()})("own")


# what is wrong -> pattern, engine, stage, message
ON_PLANNING = {
    "template raises": (pattern(template=boom), engine(), "template", "raised KeyError: 'oops'"),
    "template exits": (pattern(template=leave), engine(), "template", "raised SystemExit: 3"),
    "template gives nothing": (
        pattern(template=answer(None)),
        engine(),
        "matching",
        "must return node outputs by name, got None",
    ),
    "an op that is none": (pattern(template=unknown_op), engine(), "template", "no op is named 'softmaxx'; there are"),
    "two ends": (
        pattern(template=lambda g: {"a": g.relu(g.capture("x")), "b": g.tanh(g.capture("x"))}),
        engine(),
        "matching",
        "one returned node must depend on all others",
    ),
    "a port that is none": (
        pattern(template=lambda g: {"a": g.relu("x")}),
        engine(),
        "template",
        "relu: input must be a capture",
    ),
    "facts raise": (pattern(facts=boom), engine(), "facts", "raised KeyError: 'oops'"),
    "facts are not frozen": (pattern(facts=Melting), engine(), "facts", "raised TypeError: unhash"),
    "facts do not hash": (pattern(facts=lambda m: Unhashable([])), engine(), "facts", "raised TypeError: unhash"),
    "grow raises": (pattern(grow=boom), engine(), "grow", "raised KeyError: 'oops'"),
    "grow gives lists": (pattern(grow=lambda m: [[0]]), engine(), "matching", "raised TypeError: unhashable"),
    "grow gives no nodes": (
        pattern(grow=lambda m: [frozenset({9})]),
        engine(),
        "matching",
        "numbers of nodes, got .*9",
    ),
    "why_not raises": (pattern(), engine(why_not=boom), "why_not", "raised KeyError: 'oops'"),
    "why_not exits": (pattern(), engine(why_not=leave), "why_not", "raised SystemExit: 3"),
    "propose raises": (pattern(), engine(propose=boom), "propose", "raised KeyError: 'oops'"),
    "propose gives a dict": (pattern(), engine(propose=answer({"size": 1})), "describing", "raised TypeError"),
    "propose gives dicts": (pattern(), engine(propose=answer([{}])), "describing", "raised TypeError"),
    "in_place gives ids": (pattern(), engine(in_place=answer((0, 1))), "in_place", "raised TypeError"),
    "notes raise": (pattern(), engine(notes=boom), "notes", "raised KeyError: 'oops'"),
    "notes are none": (pattern(), engine(notes=answer([None])), "notes", "raised TypeError"),
}


@pytest.fixture
def installed(monkeypatch):
    """installed(pattern, engine): as if a package had brought them."""

    def install(*items):
        both = [
            tuple(item for item in items if isinstance(item, Pattern) is is_pattern) for is_pattern in (True, False)
        ]
        origins = dict.fromkeys(map(id, items), EXTRA)
        origins |= dict.fromkeys(map(id, (*PATTERNS, *ENGINES)), plugins.FIRST_PARTY)
        registry = plugins.Registry((*PATTERNS, *both[0]), (*ENGINES[:-1], *both[1], ENGINES[-1]), origins)
        monkeypatch.setattr(plugins, "installed", lambda: registry)
        monkeypatch.setattr(plugins, "_origins", origins)
        monkeypatch.setattr(guard, "_warned", set())

    return install


def relu(device="cpu", compute=data_type.DOUBLE):
    """A graph of one node, which kernels do not take where it computes in float64."""
    g = graphs.new(device=device, compute_data_type=compute)
    g.relu(g.tensor([3], name="x")).set_output().set_name("out")
    return g


def run(g) -> str:
    """Executes relu; the name of the plan."""
    x, out = torch.tensor([-1.0, 0.0, 2.0]), torch.full([3], float("nan"))
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert torch.equal(out, x.relu())
    return g.get_plan_name_at_index(g._planner.selected())


@pytest.mark.parametrize(("pattern", "engine", "stage", "message"), ON_PLANNING.values(), ids=ON_PLANNING)
def test_one_that_was_passed_raises(pattern, engine, stage, message):
    what = "pattern" if stage in ("template", "facts", "grow", "matching") else "engine"
    with pytest.raises(PluginError, match=f"(?s){what} 'own': {stage} for relu.0 .*{message}") as raised:
        relu().build([heur_mode.A], patterns=[pattern], engines=[engine])
    error = raised.value
    assert (error.distribution, error.plugin, error.stage, error.nodes) == (None, "own", stage, ("relu.0",))


@pytest.mark.parametrize(("pattern", "engine", "stage", "message"), ON_PLANNING.values(), ids=ON_PLANNING)
def test_an_installed_one_is_left_out(installed, pattern, engine, stage, message):
    installed(pattern, engine)
    with pytest.warns(
        RuntimeWarning, match=f"(?s)left out: .* 'own' of extra-plugin 1.0: {stage} for relu.0 .*{message}"
    ):
        g = relu()
        g.build([heur_mode.A])
    assert run(g) == "reference"
    account = g.explain()
    assert "'own' of extra-plugin 1.0" in account and stage in account
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once only
        again = relu()
        again.build([heur_mode.A])
        assert run(again) == "reference"
    # Where nothing else takes the graph, the reason is among the reasons.
    none = relu()
    with pytest.raises(GraphNotSupportedError, match=f"(?s)'own' of extra-plugin 1.0: {stage}"):
        none.build([heur_mode.OPENSOURCE])


def test_an_answer_that_is_no_reason_is_none_to_run():
    """False is no None: the engine is not asked to run what it may have meant to decline."""
    for bad in (engine(why_not=answer(False)), engine(propose=answer([]))):
        g = relu()
        g.build([heur_mode.A], patterns=[pattern()], engines=[bad, "reference"])
        assert run(g) == "reference" and "own declines relu.0" in g.explain()


def test_first_party_errors_are_not_a_plugins(installed):
    """A bug of this package, or no memory: it is raised as it is."""
    installed()

    def full(*arguments):
        raise MemoryError("none left")

    *_, reference = ENGINES
    about = "not looked at"
    with pytest.raises(MemoryError):
        guard.call(reference, about, "why_not", full)
    assert guard.running(reference, about, full) is full


def test_functions_go_on_without_it(installed, plan_on):
    """One whose pattern fits what they compute, and whose engine cannot say whether it takes it."""
    plan_on("cpu")
    (rmsnorm,) = toys.solo("rmsnorm")
    installed(dataclasses.replace(rmsnorm, template=norm), engine(why_not=boom))
    x, weight = torch.randn(4, 64), torch.rand(64)
    with pytest.warns(
        RuntimeWarning, match="left out: engine 'own' of extra-plugin 1.0: why_not for .* KeyError: 'oops'"
    ):
        y = functional.rmsnorm(x, weight)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


def test_keyboard_interrupts_are_the_users():
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        relu().build([heur_mode.A], patterns=[pattern()], engines=[engine(why_not=interrupted)])


def test_the_same_plugin_installed_and_passed_raises(installed):
    own, bad = pattern(), engine(why_not=boom)
    installed(own, bad)
    with pytest.raises(
        PluginError, match="engine 'own' of extra-plugin 1.0: why_not for relu.0 raised KeyError"
    ) as raised:
        relu().build([heur_mode.A], engines=[bad])
    assert raised.value.distribution == "extra-plugin"


def test_facts_that_no_engine_serves_are_named(installed):
    installed(pattern(facts=lambda m: Unserved(m.subgraph)), engine())
    g = relu()
    g.build([heur_mode.A])
    assert run(g) == "reference"
    told = "planning declines relu.0: it matched, and no engine serves its facts, Unserved"
    assert told in g.explain()
    with pytest.raises(
        GraphNotSupportedError, match="it matched, and no engine serves its facts, Unserved .pattern own"
    ):
        relu().build([heur_mode.OPENSOURCE])


@pytest.mark.parametrize("raises", [boom, leave])
def test_what_running_raises_is_named(installed, raises):
    bad = engine(run=raises)
    with pytest.raises(PluginError, match="engine 'own': run for relu.0 raised (KeyError|SystemExit)"):
        g = relu()
        g.build([heur_mode.A], patterns=[pattern()], engines=[bad])
        run(g)
    own = pattern()
    installed(own, bad)
    g = relu()
    g.build([heur_mode.A])
    with pytest.raises(PluginError, match="engine 'own' of extra-plugin 1.0: run for relu.0 raised"):
        run(g)


def test_a_damaged_table_of_knobs_leaves_its_engine_out(installed, tmp_path, monkeypatch):
    package = tmp_path / "plugin_with_a_table"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text("from support import toys\nclass Own(toys.HostSolo):\n    pass\n")
    (package / "own.sm_90.json").write_text("damaged")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.modules", dict(sys.modules))
    made, known = importlib.import_module("plugin_with_a_table.own").Own("own"), pattern()
    with pytest.raises(PluginError, match="engine 'own': table for relu.0 .*own.sm_90.json of plugin_with_a_table"):
        relu("emulator").build([heur_mode.A], patterns=[known], engines=[made])
    installed(known, made)
    with pytest.warns(RuntimeWarning, match="engine 'own' of extra-plugin 1.0: table for relu.0 .*own.sm_90.json"):
        g = relu("emulator")
        g.build([heur_mode.A])
    assert run(g) == "reference" and "'own' of extra-plugin 1.0: table for relu.0" in g.explain()
    with pytest.raises(GraphNotSupportedError, match="engine 'own' of extra-plugin 1.0: table for relu.0"):
        relu("emulator").build([heur_mode.OPENSOURCE])


def test_chosen_knobs_are_asked_about_by_the_same_rules():
    g = relu()
    g.validate()
    g.build_operation_graph(patterns=[pattern()], engines=[engine(illegal=boom)])
    g.create_execution_plans([heur_mode.A])
    with pytest.raises(PluginError, match="engine 'own': illegal for relu.0 raised KeyError"):
        g.create_execution_plan("own", {"size": 7})


# Kernels


GOOD = """
#include "graphfuse/simt.cuh"
#include "generated.cuh"
extern "C" GF_KERNEL(64) own(const float* x, float* out, int n) {
  const int i = gf::block_index() * 64 + gf::thread_index();
  if (i < n) out[i] = x[i] > 0.0f ? x[i] : 0.0f;
}
"""


class Own(KernelEngine):
    name = "own"
    facts = toys.Solo
    knobs = toys.Knobs
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A})
    entry = "own"
    text = GOOD

    def why_not(self, facts, device):
        return None if device.runs_kernels else No("it needs kernels")

    def propose(self, facts, device, mode):
        return (toys.Knobs(1), toys.Knobs(2))

    def source(self, facts, knobs):
        return render(self.text, "", "own.cu")

    def launch(self, facts, knobs):
        (x,), (out,) = facts.subgraph.inputs, facts.subgraph.outputs
        n = facts.subgraph.graph.tensors[out].elements
        return Launch(-(-n // 64), 64, (Address(x), Address(out), Constant("int32", n)))


def own(**changes) -> KernelEngine:
    return type("OwnKernel", (Own,), {k: staticmethod(v) if callable(v) else v for k, v in changes.items()})()


KERNELS = {
    "launch raises": (own(launch=boom), PluginError, "launch for .* raised KeyError"),
    "launch gives a dict": (own(launch=answer({})), PluginError, "launch for .* gave {}; accepted: a Launch"),
    "block of none": (own(launch=answer(Launch(1, 0, ()))), PluginError, "launch for .* a Launch whose block is 0"),
    "arguments of no kind": (own(launch=answer(Launch(1, 64, 7))), PluginError, "launch for .* raised TypeError"),
    "rows of no kind": (own(launch=answer(Launch(1, 64, (), by_rows=4))), PluginError, "launch for .* raised Attr"),
    "source raises": (own(source=boom), PluginError, "source for .* raised KeyError: 'oops'"),
    "source gives none": (own(source=answer(None)), PluginError, "prepare for .* raised AttributeError"),
    "no entry": (own(entry=None), PluginError, "prepare for .* raised TypeError"),
    "prepare gives none": (own(prepare=answer(None)), PluginError, "prepare for .* raised TypeError"),
    "too few arguments": (own(launch=answer(Launch(1, 64, ()))), PluginError, "arguments are 0; accepted: 3"),
    "it does not compile": (own(text=GOOD.replace("if (", "if ((")), GraphfuseError, "'own' does not run on the emul"),
}


def emulated():
    """tanh(relu(relu(x))), so that a plan has several of its parts."""
    g = graphs.new(device="emulator")
    g.tanh(g.relu(g.relu(g.tensor([100], name="x")))).set_output().set_name("out")
    return g


def execute(g):
    x, out = torch.randn(100), torch.full([100], float("nan"))
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert torch.allclose(out, x.relu().tanh())


@pytest.mark.emulate
@pytest.mark.parametrize(("engine", "error", "message"), KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("policy", [build_plan_policy.HEURISTICS_CHOICE, build_plan_policy.ALL], ids=str)
def test_kernels_that_cannot_be_made(installed, engine, error, message, policy):
    with pytest.raises(error, match=message):
        emulated().build([heur_mode.A], policy, patterns=[pattern()], engines=[engine])
    known = pattern()
    installed(known, engine)
    with pytest.warns(RuntimeWarning, match=f"a plug-in is left out: engine 'own' of extra-plugin 1.0: .*{message}"):
        g = emulated()
        g.build([heur_mode.A], policy)
    execute(g)
    assert "own" not in g.get_plan_name_at_index(g._planner.selected())
    assert "left out" in g.explain()
    with pytest.raises(GraphNotSupportedError, match=f"left out: engine 'own' of extra-plugin 1.0: .*{message}"):
        relu("emulator", data_type.FLOAT).build([heur_mode.OPENSOURCE], patterns=["own"])


@pytest.mark.emulate
def test_a_good_one_runs(installed):
    installed(pattern(), own())
    g = emulated()
    g.build([heur_mode.A])
    execute(g)
    assert g.get_plan_name_at_index(0).count("own") == 2


@pytest.mark.emulate
def test_the_source_is_asked_for_once():
    asked = []

    class Asked(Own):
        def source(self, facts, knobs):
            asked.append(facts.subgraph.nodes[0].name)
            return super().source(facts, knobs)

    g = emulated()
    g.build([heur_mode.A], patterns=[pattern()], engines=[Asked(), "reference"])
    execute(g)
    assert asked == ["relu.0", "relu.1"]
