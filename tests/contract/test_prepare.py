"""What an engine prepares when a plan is built: compiled once, with workspace of its own, run by raw addresses.

The engine here has a library's life cycle, as cuDNN's: a plan is built once for a graph, says then how much workspace
it needs, and is run by addresses and a handle that belongs to one thread.
"""

import ctypes
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import graphfuse
from graphfuse import (
    GraphNotSupportedError,
    GraphStateError,
    WorkspaceError,
    build_plan_policy,
    heur_mode,
)
from graphfuse.base.errors import PluginError
from graphfuse.contract.engine import (
    Address,
    Engine,
    FrozenCall,
    HostScalar,
    No,
    Outline,
    Prepared,
    ProblemClass,
    RowCount,
    Scratch,
)
from graphfuse.contract.served import EVERYTHING
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.op_graph.freeze import freeze
from graphfuse.planning.planner import Planner
from graphfuse.runtime.timing import Time
from graphfuse.tuning.report import BEST, BROKEN, TIMED
from graphfuse.tuning.search import Round, search
from graphfuse.tuning.workbench import Workbench, reference, tunable
from support import graphs, toys

OPEN = [heur_mode.OPENSOURCE]


@dataclass(frozen=True)
class Algorithm:
    """extra: bytes of workspace beyond what the elements take, which only building tells."""

    extra: int = 0


class Library:
    """relu(x) + bias of float32, through a copy in the workspace. Counts what is done, by thread."""

    def __init__(self):
        self.built: list[Algorithm] = []
        self.handles: dict[int, list[int]] = {}  # streams that each thread's handle ran on

    def build(self, elements: int, algorithm: Algorithm) -> "LibraryPlan":
        self.built.append(algorithm)
        return LibraryPlan(self, elements, 4 * elements + algorithm.extra)


@dataclass(frozen=True, eq=False)
class LibraryPlan:
    library: Library
    elements: int
    workspace_bytes: int

    def run(self, stream: int, workspace: int, x: int, out: int, bias: float = 0.0) -> None:
        assert all(type(place) is int for place in (stream, workspace, x, out)) and type(bias) is float
        self.library.handles.setdefault(threading.get_ident(), []).append(stream)
        ctypes.memset(workspace, 0xA5, self.workspace_bytes)  # all of it is its own
        ctypes.memmove(workspace, x, 4 * self.elements)
        copy, result = ((ctypes.c_float * self.elements).from_address(at) for at in (workspace, out))
        for i in range(self.elements):
            result[i] = max(copy[i], 0.0) + bias


class LibraryEngine(Engine):
    """Serves single nodes. refused: algorithms that the library finds unsupported only when it builds them."""

    name = "library"
    facts = toys.Solo
    knobs = Algorithm
    serves = EVERYTHING
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A})

    def __init__(self, extras=(0,), refused=(), undependable: str | None = "it is a call"):
        self.library, self.extras, self.refused, self.undependable = Library(), extras, refused, undependable
        self.frozen: list[bool] = []

    def why_not(self, facts, device):
        return None if device.memory == "cpu" else No("needs CPU memory")

    def propose(self, facts, device, mode):
        return tuple(map(Algorithm, self.extras))

    def prepare(self, facts, knobs, device, site):
        if knobs.extra in self.refused:
            raise GraphNotSupportedError(f"the library has no plan with {knobs.extra} bytes more")
        tensors = site.subgraph.graph.tensors
        x, *bias = sorted(site.subgraph.inputs, key=lambda t: tensors[t].by_value)
        (out,) = site.subgraph.outputs
        plan = self.library.build(tensors[out].elements, knobs)
        call = FrozenCall((Scratch(), Address(x), Address(out), *map(HostScalar, bias)), plan.run)

        def freeze(dependent: bool) -> FrozenCall:
            self.frozen.append(dependent)
            return call

        return Prepared(freeze, plan.workspace_bytes, self.undependable)


def planned(engine, *names: str, elements: int = 100, device: str = "cpu", modes=OPEN):
    """A chain of nodes on a row of floats, "x" to "out", each a region of its own."""
    g = graphs.new("chain", device=device)
    y = g.tensor([elements], name="x")
    for name in names or ("relu",):
        y = getattr(g, name)(y)
    y.set_output().set_name("out")
    g.validate()
    g.build_operation_graph(patterns=toys.solo("relu"), engines=[engine])
    g.create_execution_plans(modes)
    return g


def ran(g, elements: int = 100, execute=None) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(elements), torch.full((elements,), float("nan"))
    size = g.get_workspace_size()
    (execute or g.execute)({"x": x, "out": out}, graphs.workspace(size) if size else None)
    return x, out


def names(g) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_it_is_built_once_and_says_its_workspace_then(device):
    engine = LibraryEngine(extras=(56,))
    g = planned(engine, device=device)
    assert engine.library.built == [] and g.get_workspace_size_plan_at_index(0) == 0  # planning builds nothing
    g.build_plans()
    g.build_plans()
    assert g.get_workspace_size() == g.get_workspace_size_plan_at_index(0) == 456
    for _ in range(5):
        x, out = ran(g)
        assert torch.equal(out, x.relu())
    assert engine.library.built == [Algorithm(56)] and engine.frozen == [False]
    assert g.get_plan_name_at_index(0) == "library[extra=56]"  # not a kernel that the emulator runs
    with pytest.raises(WorkspaceError, match="no workspace was given; accepted: 456 bytes"):
        g.execute({"x": x, "out": out})


def test_bound_calls_and_threads_share_what_was_built():
    engine = LibraryEngine()
    g = planned(engine)
    g.build_plans()
    faults = []

    def some() -> None:
        try:
            x, out, space = torch.randn(100), torch.empty(100), graphs.workspace(400)
            call = g.bind({"x": x, "out": out}, space)
            for n in range(50):
                x.normal_()
                call() if n % 2 else g.execute({"x": x, "out": out}, space)
                assert torch.equal(out, x.relu())
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=some) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults and len(engine.library.built) == 1
    assert sum(map(len, engine.library.handles.values())) == 200 and engine.library.handles.keys() <= {
        t.ident for t in threads
    }


def test_numbers_are_given_as_numbers():
    g, engine = graphs.new(), LibraryEngine()
    x, b = g.tensor([1], name="x"), g.tensor([1], is_pass_by_value=True, name="b")
    g.add(g.relu(x), b).set_output().set_name("out")
    g.build(OPEN, patterns=toys.solo("relu", "add"), engines=[engine])
    value, out = torch.tensor([2.5]), torch.empty(1)
    g.execute({"x": value, "b": 0.25, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert out.item() == 2.75 and len(engine.library.built) == 2


def test_workspace_found_at_build_lies_beside_what_lives_then():
    """Each part overwrites all of its own workspace; what parts hand on survives."""
    engine = LibraryEngine(extras=(1000,))
    g = planned(engine, "relu", "relu", "relu")
    before = g.get_workspace_size_plan_at_index(0)
    g.build_plans()
    assert before == 512 + 400 and g.get_workspace_size() == 1024 + 1400
    x, out = ran(g)
    assert torch.equal(out, x.relu()) and len(engine.library.built) == 3


def test_an_outline_that_knows_is_kept():
    class Knows(LibraryEngine):
        def outline(self, facts, knobs):
            (out,) = facts.subgraph.outputs
            return Outline(4 * facts.subgraph.graph.tensors[out].elements + knobs.extra)

    g = planned(Knows(extras=(8,)))
    assert g.get_workspace_size_plan_at_index(0) == 408
    before = g._planner.at(0)
    g.build_plans()
    assert g._planner.at(0) is before and g.get_workspace_size() == 408


@pytest.mark.parametrize("policy", build_plan_policy)
def test_what_cannot_be_prepared_is_passed_over(policy):
    engine = LibraryEngine(extras=(1, 2, 3, 4), refused=(1, 2, 4))
    g = planned(engine)
    g.build_plans(policy)
    x, out = ran(g)
    assert torch.equal(out, x.relu()) and engine.library.built == [Algorithm(3)]
    text = g.explain()
    assert "0: library[extra=1], 0 bytes of workspace (barred: it cannot be prepared: the library has no plan" in text
    assert "2: library[extra=3], 403 bytes of workspace (selected)" in text
    assert ("3: library[extra=4], 0 bytes of workspace (barred" in text) == (policy is build_plan_policy.ALL)
    with pytest.raises(GraphNotSupportedError, match="the library has no plan with 1 bytes more"):
        g.build_plan_at_index(0)
    with pytest.raises(GraphStateError, match="plan 0.*not built"):
        g.execute_plan_at_index({"x": x, "out": out}, None, 0)
    engine.refused = ()  # it is tried again when it is asked for
    g.build_plan_at_index(0)
    assert "0: library[extra=1], 401 bytes of workspace (selected)" in g.explain()


def test_where_none_can_be_prepared_every_reason_is_said():
    engine = LibraryEngine(extras=(1, 2), refused=(1, 2))
    g = planned(engine)
    for call in (g.build_plans, g.check_support):
        with pytest.raises(GraphNotSupportedError) as caught:
            call()
        for extra in (1, 2):
            assert f"plan library[extra={extra}]: it cannot be prepared: the library has no plan" in str(caught.value)
    engine.refused = ()
    g.build_plans()
    assert "0: library[extra=1], 401 bytes of workspace (selected)" in g.explain()


def test_the_only_plan_says_its_reason_itself():
    g = planned(LibraryEngine(extras=(1,), refused=(1,)))
    with pytest.raises(GraphNotSupportedError, match="^the library has no plan with 1 bytes more$"):
        g.build_plans()


def test_a_plan_that_turns_out_to_need_too_much_workspace_is_passed_over():
    engine = LibraryEngine(extras=(5000, 100))
    g = planned(engine).deselect_workspace_greater_than(600)
    g.check_support()  # nothing is known against the first one yet
    g.build_plans()
    assert (
        g.get_workspace_size() == 500 and "it needs 5400 bytes of workspace, more than the limit of 600" in g.explain()
    )
    with pytest.raises(GraphNotSupportedError, match="plan 0 .*needs 5400 bytes of workspace"):
        g.build_plan_at_index(0)


def test_faults_of_engines_are_not_passed_over():
    class Faulty(LibraryEngine):
        def prepare(self, facts, knobs, device, site):
            raise ZeroDivisionError("a bug")

    class Careless(LibraryEngine):
        def prepare(self, facts, knobs, device, site):
            return 5

    with pytest.raises(PluginError, match="'library': prepare for relu.0 raised ZeroDivisionError: a bug"):
        planned(Faulty(extras=(1, 2))).build_plans()
    with pytest.raises(PluginError, match="'library': prepare for relu.0 raised TypeError"):
        planned(Careless(extras=(1, 2))).build_plans()


@pytest.mark.emulate
def test_a_kernel_that_does_not_compile_gives_way_with_a_warning():
    class Broken(toys.ScratchSolo):
        def source(self, facts, knobs):
            return "not C++"

    engine = Broken(0)
    g = planned(engine, device="emulator", modes=[heur_mode.OPENSOURCE, heur_mode.FALLBACK])
    assert names(g) == ["emulator: scratch", "reference"]
    with pytest.warns(RuntimeWarning, match="another plan takes the place of one that fails: .*'none'"):
        g.build_plans()
    x, out = ran(g)
    assert torch.equal(out, x.relu()) and "1: reference, 0 bytes of workspace (selected)" in g.explain()


def test_dependent_launch_is_the_engines_to_allow():
    engine = LibraryEngine()
    g = planned(engine, device="emulator")
    g.build_plans()
    pack, space = {"x": torch.randn(100), "out": torch.empty(100)}, graphs.workspace(400)
    with pytest.raises(GraphNotSupportedError, match="programmatic_dependent_launch needs .*'library': it is a call"):
        g.execute(pack, space, programmatic_dependent_launch=True)
    assert engine.frozen == [False]
    engine = LibraryEngine(undependable=None)
    g = planned(engine, device="emulator")
    g.build_plans()
    g.execute(pack, space, programmatic_dependent_launch=True)
    assert torch.equal(pack["out"], pack["x"].relu()) and engine.frozen == [False, True]


def test_functions_of_python_cannot_be_launched_dependently():
    g = planned(toys.HostSolo(), device="emulator")
    g.build_plans()
    with pytest.raises(GraphNotSupportedError, match="engine 'solo': it runs from Python"):
        g.bind({"x": torch.randn(100), "out": torch.empty(100)}, programmatic_dependent_launch=True)


def test_a_call_may_serve_any_number_of_rows():
    seen = []

    class ByRows(LibraryEngine):
        def prepare(self, facts, knobs, device, site):
            frozen = FrozenCall((RowCount(), Address(site.subgraph.inputs[0])), lambda *v: seen.append(v), rows=100)
            return Prepared(lambda dependent: frozen)

    g = planned(ByRows())
    g.build_plans()
    executable = g._planner.executable()
    executable.counted(50, False)(0, 0, 7, 4096, 8192)
    executable.starts[False](0, 0, 0, 4096, 8192)
    assert seen == [(0, 14, 4096), (0, 100, 4096)]
    assert executable.counted(33, False) is None  # of which 100 is no multiple
    fixed = planned(LibraryEngine())
    fixed.build_plans()
    assert fixed._planner.executable().counted(50, False) is None


def test_nothing_but_the_contract_knows_kinds_of_engines():
    folder = Path(graphfuse.__file__).parent
    others = ("contract", "plugin.py", "engines")  # the last where it is installed
    files = [path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in others]
    files = [path for path in files if "plugin_template" not in path.parts]  # which has one
    assert len(files) > 50
    assert not [path for path in files if re.search(r"\b(Kernel|Host)Engine\b", path.read_text())]


class Tuned(LibraryEngine):
    def problem(self, facts):
        return ProblemClass({}, 1)


def test_it_is_tuned_as_kernels_are():
    engine = Tuned(extras=(0, 4096, 8), refused=(8,))
    g = planned(engine)
    planner = Planner(freeze(g), None, toys.solo("relu"), [engine])
    planner.create(OPEN)
    pack = {"x": torch.randn(100), "out": torch.zeros(100)}
    (part,) = planner.plans[0].parts
    assert tunable(part) and part.why == "heuristic"
    found = planner.binder(planner.plans[0]).bind(pack, None)
    bench = Workbench(part, planner.device, reference(planner.plans[0], planner.device, found), found.scalars)

    def measured(calls, repeats, least_us, limit):
        calls[-1]()
        return Time(float(repeats), 0.0, 0.0)

    with pytest.warns(RuntimeWarning, match="'extra': 8.*the library has no plan with 8 bytes more"):
        knobs = [Algorithm(extra) for extra in engine.extras]
        trials = search(bench, knobs, time.monotonic() + 60, (Round(1, 0, most=2), Round(2, 0)), measured)
    assert [t.status for t in trials] == [BEST, TIMED, BROKEN]
    assert not pack["out"].any()  # it works in memory of its own


def test_nothing_to_compute_is_not_tuned():
    engine = Tuned()
    part = planned(engine, elements=0)._planner.at(0).parts[0]
    assert not tunable(part) and not tunable(planned(LibraryEngine())._planner.at(0).parts[0])


def test_the_reference_engine_is_prepared_as_any_other():
    g = planned(LibraryEngine(), modes=[heur_mode.FALLBACK])
    (part,) = g._planner.at(0).parts
    assert isinstance(part.engine, ReferenceEngine) and part.outline == Outline()
    g.build_plans()
    x, out = ran(g)
    assert torch.equal(out, x.relu()) and not g._planner.at(0).emulated
