"""How plans of cuDNN's engine are prepared and called, where there is no cuDNN."""

import contextlib
import ctypes
import dataclasses
import struct
import threading
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import (
    DeviceError,
    GraphNotSupportedError,
    heur_mode,
)
from graphfuse.base.device import for_arch
from graphfuse.contract.engine import Address, Constant, HostScalar, Scratch
from graphfuse.engines.cudnn import CudnnEngine, calls, devices, engine, handles, plans
from graphfuse.engines.cudnn.translation import Translation
from graphfuse.op_graph.ir import Subgraph
from graphfuse.patterns import epilogues
from support import graphs
from support.products import lowered, product

H200 = dataclasses.replace(for_arch("sm_90a"), here=True)


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

    def planned(cudnn, nodes, handle):
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
    built = plans.BuiltPlan(Translation(graph, made.bound, made.by_value, made.constants), 3, 3, workspace)
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

    with pytest.raises(GraphNotSupportedError, match="cuDNN requires tensors .*999.*; it was given"):
        frozen(library, Other)
