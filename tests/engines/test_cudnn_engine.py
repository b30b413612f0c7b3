"""cuDNN's engine where there is no cuDNN: which nodes it is asked for, when, what it says, and how plans are called."""

import contextlib
import ctypes
import gc
import struct
import subprocess
import sys
import threading
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import (
    DeviceError,
    GraphNotSupportedError,
    GraphValidationError,
    SettingError,
    data_type,
    heur_mode,
    plan,
    plugins,
    reduction_mode,
)
from graphfuse.device import for_arch
from graphfuse.engine import Address, Constant, HostScalar, Scratch
from graphfuse.engines.cudnn import CudnnEngine, calls, devices, engine, handles, plans
from graphfuse.engines.cudnn.translation import Translation
from graphfuse.freeze import freeze
from graphfuse.ir import Subgraph
from graphfuse.lower import lower
from graphfuse.patterns import epilogues
from support import graphs, whole
from support.graphs import BF16, FLOAT

H200 = for_arch("sm_90a")


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    monkeypatch.delenv("GRAPHFUSE_CUDNN", raising=False)
    plugins.forget()
    yield
    plugins.forget()


def lowered(g):
    g.validate()
    return lower(freeze(g))


def regions(g) -> list[list[str]]:
    """Names of the nodes of each region of the pattern, largest first."""
    found, declined = plan.matches(lowered(g), plugins.registry(engines=["cudnn"]))
    assert not declined
    return [[n.name for n in r.subgraph.nodes] for r in found if r.pattern == "epilogue"]


def product(g, batch=(), **kwargs):
    a, b = (g.tensor([*batch, *dim], data_type=BF16) for dim in ((8, 16), (16, 4)))
    return g.matmul(a, b, name="product", **kwargs)


# Regions


def test_a_product_with_its_epilogue_and_every_shorter_one():
    g = graphs.new()
    y = g.bias(product(g), g.tensor([1, 4]), name="bias")
    y = g.add(g.relu(y, name="relu"), g.tensor([8, 4]), name="residual")
    g.mul(y, 0.5, name="scale").set_output()
    whole_one = ["product", "bias", "relu", "residual", "scale"]
    assert regions(g) == [whole_one[:n] for n in (5, 4, 3, 2, 1)]


def test_what_is_not_of_the_products_shape_or_not_pointwise_stays_outside():
    g = graphs.new()
    x = product(g)
    g.relu(g.reduction(x, mode=reduction_mode.ADD).set_dim([8, 1]), name="other").set_output()
    y = g.softmax(g.exp(x, name="exp"), name="softmax")
    g.relu(y, name="after").set_output()
    assert regions(g) == [["product", "exp"], ["product"]]


def test_what_would_lead_out_and_back_stays_outside():
    g = graphs.new()
    x = product(g)
    g.add(g.relu(x, name="relu"), g.softmax(x, name="softmax"), name="sum").set_output()
    assert regions(g) == [["product", "relu"], ["product"]]


def test_what_comes_before_stays_outside_and_long_epilogues_end():
    g = graphs.new()
    y = g.matmul(g.relu(g.tensor([8, 16]), name="before"), g.tensor([16, 4]), name="product")
    for n in range(12):
        y = g.relu(y, name=f"relu{n}")
    y.set_output()
    found = regions(g)
    assert len(found) == epilogues.LONGEST + 1 and "before" not in sum(found, [])
    assert found[0] == ["product", *(f"relu{n}" for n in range(epilogues.LONGEST))]


def test_attention_and_norms_are_taken_alone():
    g = graphs.new()
    q, k, v = (g.tensor([1, 2, 4, 8]) for _ in "qkv")
    y = g.relu(g.sdpa(q, k, v, name="attention")[0], name="relu")
    g.batchnorm_inference(y, *[g.tensor([1, 2, 1, 1]) for _ in range(4)], name="norm").set_output()
    assert sorted(regions(g)) == [["attention"], ["norm"]]


@given(graph=whole.drawn())
def test_regions_of_any_graph_can_run_as_one(graph):
    low = lowered(graph.build())
    found, _ = plan.matches(low, plugins.registry(engines=["cudnn"]))
    own = [r for r in found if r.pattern == "epilogue"]
    for region in own:
        anchors = [n for n in region.subgraph.nodes if n.op_name in (*epilogues.PRODUCTS, *epilogues.ALONE)]
        assert [n.name for n in anchors] == [region.facts.node] and region.facts.subgraph == region.subgraph
        assert plan.schedule(low, [region.subgraph]) is not None
    taken = {i for r in own for i in r.subgraph.node_ids if len(r.subgraph.node_ids) == 1}
    names = (*epilogues.PRODUCTS, *epilogues.ALONE)
    assert taken == {i for i, n in enumerate(low.nodes) if n.op_name in names}


# When it is asked


def test_only_on_request(monkeypatch):
    names = [e.name for e in plugins.registry().engines]
    assert "cudnn" not in names and epilogues.PATTERN not in plugins.registry().patterns
    chosen = plugins.registry(engines=["cudnn", "reference"])
    assert [e.name for e in chosen.engines] == ["cudnn", "reference"] and epilogues.PATTERN in chosen.patterns
    given_object = plugins.registry(engines=[CudnnEngine()])
    assert [e.name for e in given_object.engines] == ["cudnn", *names] and epilogues.PATTERN in given_object.patterns
    for value, there in (("on", True), ("off", False), ("", False)):
        monkeypatch.setenv("GRAPHFUSE_CUDNN", value)
        found = plugins.registry()
        assert ("cudnn" in [e.name for e in found.engines]) is there is (epilogues.PATTERN in found.patterns)
    monkeypatch.setenv("GRAPHFUSE_CUDNN", "yes")
    with pytest.raises(SettingError, match="GRAPHFUSE_CUDNN='yes' is not known; accepted: on, off"):
        plugins.registry()


def test_an_unknown_engine_is_told_of_it():
    with pytest.raises(GraphValidationError, match="no engine is named 'cuDNN'; there are: .*cudnn"):
        plugins.registry(engines=["cuDNN"])


def test_it_is_not_imported_unless_asked_for():
    code = """
import sys
import graphfuse
g = graphfuse.pygraph(handle=graphfuse.create_handle("cpu"), io_data_type=graphfuse.data_type.FLOAT)
g.matmul(g.tensor([2, 3]), g.tensor([3, 2])).set_output()
g.build([graphfuse.heur_mode.A, graphfuse.heur_mode.FALLBACK])
assert "cudnn" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B, heur_mode.FALLBACK])
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_without_cudnn_the_reference_engine_runs_it(mode, device):
    g = graphs.new(device=device)
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    y = g.matmul(g.tensor([8, 16], name="a"), g.tensor([16, 4], name="b"), name="product")
    g.relu(y).set_output().set_name("out")
    g.build([mode], engines=["cudnn", "reference"])
    out = torch.empty(8, 4)
    g.execute({"a": a, "b": b, "out": out})
    torch.testing.assert_close(out.double(), (a.double() @ b.double()).relu(), atol=1e-5, rtol=1e-5)
    assert g.get_plan_name_at_index(0) == "reference"
    assert f"cuDNN runs on CUDA devices, not on {device}" in g.explain()


def test_a_missing_package_is_the_reason_on_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    g = graphs.new()
    product(g).set_output()
    low, known = lowered(g), plugins.registry(engines=["cudnn", "reference"])
    found, _ = plan.matches(low, known)
    for mode in plans.MODES:
        proposal = plan.propose(low, found, known.engines, H200, mode)
        assert [p.name for p in proposal.plans] == ["reference"]
        assert any("nvidia-cudnn-frontend is not installed" in line for line in plan.refusals(proposal))


def test_it_declines_what_it_cannot_be_told():
    g = graphs.new(compute_data_type=data_type.DOUBLE)
    product(g).set_output()
    facts = Subgraph(lowered(g), (0,))
    assert "computes in DOUBLE" in CudnnEngine.serves.why_not(facts)


def test_preparing_without_the_package_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    g = graphs.new()
    product(g).set_output()
    facts = epilogues.EpilogueFacts("product", Subgraph(lowered(g), (0,)))
    with pytest.raises(GraphNotSupportedError, match="nvidia-cudnn-frontend is not installed"):
        CudnnEngine().prepare(facts, plans.CudnnKnobs(0), H200, None)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda ordinal: (9, 0))
    assert devices.why_not(H200) is None
    assert "whose cuda:0 is SM90; the graph is planned for sm_100a" in str(devices.why_not(for_arch("sm_100a")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "torch sees no cuda:0" in str(devices.why_not(H200))


# What it knows of its plans


def test_alike_nodes_are_asked_for_once():
    def key(name="graph", extra=False, dtype=FLOAT, second=False):
        g = graphs.new(name)
        if extra:
            g.relu(g.tensor([3], name="x"), name="extra").set_output()
        y = g.matmul(g.tensor([8, 16], data_type=dtype), g.tensor([16, 4]), name=f"product of {name}")
        if second:
            y.set_output()
        g.relu(y, name="relu").set_output()
        low = lowered(g)
        return engine._key(Subgraph(low, tuple(i for i, n in enumerate(low.nodes) if n.name != "extra")))

    assert key() == key("another", extra=True)
    assert len({key(), key(dtype=BF16), key(second=True)}) == 3


def test_modes_and_knobs():
    g = graphs.new()
    product(g).set_output()
    facts = epilogues.EpilogueFacts("product", Subgraph(lowered(g), (0,)))
    own = CudnnEngine()
    listed = [plans.Proposed(plans.CudnnKnobs(n), heur_mode.A) for n in range(20)]
    listed += [
        plans.Proposed(plans.CudnnKnobs(20), heur_mode.B),
        plans.Proposed(plans.CudnnKnobs(1, "A=1"), heur_mode.A),
    ]
    last = plans.Proposed(plans.CudnnKnobs(30), heur_mode.FALLBACK)
    own._answers[engine._key(facts.subgraph), H200] = (*listed, last)
    numbers = {mode: [k.engine for k in own.propose(facts, H200, mode)] for mode in plans.MODES}
    assert numbers[heur_mode.A] == list(range(engine.MOST)) and numbers[heur_mode.FALLBACK] == [30]
    assert numbers[heur_mode.B] == [*range(21), 1, 30]
    assert own.illegal(facts, plans.CudnnKnobs(1, "A=1"), H200) is None
    assert "cuDNN proposes no such plan" in str(own.illegal(facts, plans.CudnnKnobs(1, "A=2"), H200))
    own._answers[engine._key(facts.subgraph), H200] = (last,)
    assert [list(own.propose(facts, H200, mode)) for mode in plans.MODES] == [[last.knobs]] * 3


def test_float32_products_are_not_rounded():
    for dtype, rounds in ((FLOAT, True), (BF16, False)):
        g = graphs.new()
        y = g.matmul(g.tensor([8, 16], data_type=dtype), g.tensor([16, 4], data_type=dtype))
        g.bias(y, g.tensor([1, 4], data_type=FLOAT)).set_output()
        assert plans.rounds_inputs(Subgraph(lowered(g), (0, 1))) is rounds


# Preparing


class Planned:
    """A graph of the package with three plans, the first of which cannot be built."""

    def __init__(self, uids):
        self.plans = [types.SimpleNamespace(cpp_index=n, engine_id=n, knobs={}) for n in range(3)]
        self.built, self._lowered_graph = [], self
        self._get_variant_pack_uids_sorted = lambda: sorted(uids)
        self._execute_with_raw_ptrs = None

    def backend_plan_entries(self):
        return [types.SimpleNamespace(cpp_index=n, mode=heur_mode.A) for n in range(3)]

    def get_behavior_notes_for_plan_at_index(self, index):
        return []

    def build_plan_at_index(self, index):
        self.built.append(index)
        if not index:
            raise RuntimeError("no")

    def get_workspace_size_plan_at_index(self, index):
        return 4096 * index


def test_the_plan_that_planning_built_is_the_one_that_is_prepared(library, monkeypatch):
    made = []

    def planned(cudnn, nodes, handle, exact):
        tensors = [nodes.graph.tensors[t] for t in (*nodes.inputs, *nodes.outputs)]
        made.append(Planned([t.uid for t in tensors]))
        return Translation(made[-1], {t.id: t.uid for t in tensors}, {}, {})

    monkeypatch.setattr(plans, "_planned", planned)
    monkeypatch.setattr(engine.package, "load", lambda: library)
    monkeypatch.setattr(devices, "why_not", lambda device: None)
    monkeypatch.setattr(devices, "current", contextlib.nullcontext)
    library.backend_version = lambda: 1

    def facts(name):
        g = graphs.new(name)
        product(g).set_output()
        return epilogues.EpilogueFacts("product", Subgraph(lowered(g), (0,)))

    own, one, alike = CudnnEngine(), facts("one"), facts("alike")
    assert own.why_not(one, H200) is None and own.why_not(alike, H200) is None
    first, second = own.propose(one, H200, heur_mode.A)
    assert (first.engine, second.engine) == (1, 2) and [g.built for g in made] == [[0, 1]]
    assert own.prepare(one, first, H200, None).workspace_bytes == 4096
    assert [g.built for g in made] == [[0, 1]]
    for facts_, knobs, built in ((one, first, 1), (one, second, 2), (alike, first, 1)):
        assert own.prepare(facts_, knobs, H200, None).workspace_bytes == 4096 * built
        assert made[-1].built == [built]
    assert len(made) == 4
    with pytest.raises(GraphNotSupportedError, match="cuDNN 1 proposes no plan .*engine=7.* here; it proposes: "):
        own.prepare(one, plans.CudnnKnobs(7), H200, None)
    with pytest.raises(GraphNotSupportedError, match="cuDNN cannot build .*engine=0.* for product: no"):
        own.prepare(one, plans.CudnnKnobs(0), H200, None)


# Calls


class Library:
    """The package's handles. Notes which threads set streams."""

    cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (RuntimeError,), {})  # noqa: N815

    def __init__(self):
        self.made, self.streams, self.destroyed = [], [], []

    def create_handle(self):
        self.made.append(types.SimpleNamespace(stream=0, backend_handle=len(self.made) + 1))
        return self.made[-1]

    def set_stream(self, handle, stream):
        self.streams.append((handle.backend_handle, stream))
        handle.stream = stream

    def destroy_handle(self, handle):
        self.destroyed.append(handle.backend_handle)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda ordinal: (0, 0))
    return Library()


def in_threads(count: int, work) -> None:
    """All of them at once."""
    barrier, faults = threading.Barrier(count), []

    def run(number):
        try:
            barrier.wait()
            work(number)
            barrier.wait()
        except BaseException as fault:
            faults.append(fault)
            barrier.abort()

    started = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not faults
    gc.collect()


def test_each_thread_has_a_handle_and_ended_ones_leave_theirs(library):
    found = handles.Handles(library, 0)
    seen = {}

    def work(number):
        for stream in (0, 7, 9):
            seen.setdefault(number, set()).add(id(found.mine()))
            found.direct(found.mine(), stream)
            assert found.threads.lease.handle is found.mine() and found.mine().stream == stream

    in_threads(5, work)
    assert len(library.made) == 5 and len(set.union(*seen.values())) == 5 and all(len(s) == 1 for s in seen.values())
    in_threads(3, work)
    assert len(library.made) == 5
    assert found.mine() is found.mine() and len(library.made) == 5 and not library.destroyed
    found.destroy()
    assert sorted(library.destroyed) == [1, 2, 3, 4, 5]


class Plan:
    """A graph of the package that keeps what it is called with; numbers are read from where they lie."""

    def __init__(self, scalars=()):
        self.scalars, self.calls = scalars, []

    def execute_plan_at_index(self, pack, workspace, index, handle):
        read = {u: v if u not in self.scalars else self.scalars[u].from_address(v).value for u, v in pack.items()}
        self.calls.append((read, workspace, index, handle.backend_handle, handle.stream))


class Fast(Plan):
    """The same through the way that takes addresses alone, which the package keeps under a private name."""

    def __init__(self, scalars=()):
        super().__init__(scalars)
        self._lowered_graph = self

    def _prepare_variant_pack_template(self):
        self.prepared = True

    def _get_variant_pack_uids_sorted(self):
        assert self.prepared
        return sorted(self.uids)

    def _execute_with_raw_ptrs(self, at, count, workspace, handle, index):
        found = (ctypes.c_uint64 * count).from_address(at)
        pack = dict(zip(sorted(self.uids), found, strict=True))
        self.execute_plan_at_index(pack, workspace, index, types.SimpleNamespace(backend_handle=handle, stream=None))


def frozen(library, kind, workspace=0):
    """out = (a @ b) * factor * 0.5, of which the factor is given and 0.5 is the graph's."""
    g = graphs.new()
    y = g.mul(product(g), g.tensor([1, 1], is_pass_by_value=True, name="factor"))
    g.mul(y, 0.5, name="half").set_output().set_name("out")
    low = lowered(g)
    uid = {t.name: t.uid for t in low.tensors}
    used = [t for t in (*Subgraph(low, (0, 1, 2)).inputs, *Subgraph(low, (0, 1, 2)).outputs)]
    tensors = [low.tensors[t] for t in used]
    made = Translation(
        None,
        bound={t.id: t.uid for t in tensors if not t.by_value},
        by_value={t.id: t.uid for t in tensors if t.by_value and t.value is None},
        constants={t.uid: t.value for t in tensors if t.value is not None},
    )
    graph = kind({t.uid: ctypes.c_float for t in tensors if t.by_value})
    graph.uids = [t.uid for t in tensors]
    built = plans.Built(Translation(graph, made.bound, made.by_value, made.constants), 3, 3, workspace)
    return calls.frozen(library, low, built, handles.Handles(library, 0)), graph, low, uid


@pytest.mark.parametrize("workspace", [0, 4096])
@pytest.mark.parametrize("kind", [Plan, Fast])
def test_a_call_gives_addresses_by_uid_and_numbers_by_value(library, kind, workspace):
    call, graph, low, uid = frozen(library, kind, workspace)
    numbers = {"factor": 1.25, **{t.name: 0.5 for t in low.tensors if t.value is not None}}
    addresses = {t.id: 4096 * (t.id + 1) for t in low.tensors}
    given = {
        Address: lambda a: addresses[a.tensor],
        HostScalar: lambda a: numbers[low.tensors[a.tensor].name],
        Constant: lambda a: a.value,
        Scratch: lambda a: 1 << 20,
    }
    assert isinstance(call.arguments[0], Scratch if workspace else Constant)
    for stream in (5, 5, 6):
        call.run(stream, *(given[type(a)](a) for a in call.arguments))
    want = {t.uid: addresses[t.id] for t in low.tensors if t.uid in graph.uids}
    want |= {uid[name]: number for name, number in numbers.items()}
    assert [c[0] for c in graph.calls] == [want] * 3
    assert {c[1] for c in graph.calls} == {1 << 20 if workspace else 0} and {c[2] for c in graph.calls} == {3}
    assert library.streams == [(1, 5), (1, 6)]  # a stream that the handle has is not set again


@pytest.mark.parametrize("kind", [Plan, Fast])
def test_other_addresses_and_numbers_take_the_place_of_the_last_ones(library, kind):
    """What was written for the last call is kept where it is the same, also after a call that cannot be written."""
    call, graph, low, uid = frozen(library, kind)
    number = low.tensors[next(t.id for t in low.tensors if t.name == "factor")].uid
    given = [1.0 if isinstance(a, HostScalar) else getattr(a, "value", 4096) for a in call.arguments]

    def called(**changed) -> dict:
        values = list(given)
        for place, a in enumerate(call.arguments):
            if isinstance(a, Address | HostScalar) and low.tensors[a.tensor].name in changed:
                values[place] = changed[low.tensors[a.tensor].name]
        call.run(5, *values)
        return graph.calls[-1][0]

    first = called()
    assert first[uid["out"]] == 4096 and first[number] == 1.0
    assert called() == first
    assert called(out=8192) == {**first, uid["out"]: 8192}
    assert called(factor=0.25) == {**first, number: 0.25}
    with pytest.raises(struct.error):
        called(out=None, factor=8.0)
    assert called(factor=0.25) == {**first, number: 0.25}
    assert called() == first


@given(data=st.data())
def test_threads_that_call_at_once_each_give_their_own(data):
    library, count = Library(), data.draw(st.integers(2, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "mem_get_info", lambda ordinal: (0, 0))
        call, graph, low, uid = frozen(library, Fast)

        def work(number):
            for _ in range(20):
                values = []
                for a in call.arguments:
                    values.append(a.value if isinstance(a, Constant) else number + 1)
                call.run(number, *values)

        in_threads(count, work)
    assert len(graph.calls) == 20 * count
    for pack, *_ in graph.calls:
        assert len({float(v) for v in pack.values()}) == 1  # all of one call's


def test_what_cudnn_reports_is_a_device_error(library):
    class Failing(Plan):
        def execute_plan_at_index(self, *given):
            raise library.cudnnGraphNotSupportedError("CUDNN_STATUS_EXECUTION_FAILED\n  at launch")

    call, *_ = frozen(library, Failing)
    with pytest.raises(DeviceError, match="^cuDNN: CUDNN_STATUS_EXECUTION_FAILED at launch$"):
        call.run(0, *(a.value if isinstance(a, Constant) else 1 for a in call.arguments))


def test_another_current_device_is_put_back(library, monkeypatch):
    current = [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    class Guard:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            self.before, current[0] = current[0], self.ordinal

        def __exit__(self, *error):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    seen = []

    class Noting(Plan):
        def execute_plan_at_index(self, *given):
            seen.append(current[0])

    call, *_ = frozen(library, Noting)
    call.run(0, *(a.value if isinstance(a, Constant) else 1 for a in call.arguments))
    assert seen == [0] and current == [1]


def test_tensors_that_cudnn_does_not_know_are_refused(library):
    class Other(Fast):
        def _get_variant_pack_uids_sorted(self):
            return [*sorted(self.uids), 999]

    with pytest.raises(GraphNotSupportedError, match="cuDNN asks for tensors .*999.*; it was told of"):
        frozen(library, Other)
