"""Graphs with plans as bytes: what runs in another process is what was built, or a typed error says why it does not."""

import functools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphfuse
from graphfuse import (
    GraphfuseError,
    GraphStateError,
    GraphTypeError,
    SerializedError,
    build_plan_policy,
    create_handle,
    heur_mode,
    pygraph,
    reduction_mode,
)
from graphfuse.base.device import for_arch
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.engines.rows import RowEngine
from graphfuse.files import sealed
from graphfuse.planning import recipe
from graphfuse.planning.planner import Planner
from graphfuse.runtime.handle import Handle
from support import edits, graphs, toys, whole
from support.graphs import Norm

ALL = build_plan_policy.ALL


def cpu() -> graphfuse.Handle:
    return create_handle("cpu")


def toy_graph(size: int = 3, name: str = "toy") -> pygraph:
    """relu on the toy engine with 3 plans, and neg on the reference engine."""
    g = graphs.new()
    g.neg(g.relu(g.tensor([10], name="x"), name="first"), name="second").set_output().set_name("out")
    g.build([heur_mode.A], ALL, **plugins(size, name))
    return g


def plugins(size: int = 3, name: str = "toy") -> dict:
    return {"patterns": toys.solo("relu"), "engines": [toys.HostSolo(name, (size, 1, 2))]}


def plan_names(g: pygraph) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


def ran(g: pygraph, x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    return out


def test_all_built_plans_and_the_selected_one_are_there():
    g = toy_graph()
    g.build_plan_at_index(2)
    again = pygraph().deserialize(cpu(), g.serialize(), **plugins())
    assert plan_names(again) == plan_names(g) and len(plan_names(g)) > 3
    assert again.get_workspace_size() == g.get_workspace_size()
    assert "2: toy[size=2] + reference" in again.explain() and "(selected)" in again.explain().split("2: toy")[1]
    x = torch.randn(10)
    assert ran(again, x).tolist() == (-x.relu()).tolist()
    out = torch.empty(10)
    again.execute_plan_at_index({"x": x, "out": out}, graphs.workspace(again.get_workspace_size()), 0)
    assert out.tolist() == (-x.relu()).tolist()
    assert again.serialize() == g.serialize()


def test_only_what_is_built_is_written():
    g = graphs.new()
    g.relu(g.tensor([10], name="x")).set_output().set_name("out")
    g.build([heur_mode.A], **plugins())
    again = pygraph(handle=cpu()).deserialize(g.serialize(), **plugins())
    assert plan_names(g) == ["toy[size=3]", "toy[size=1]", "toy[size=2]", "reference"]
    assert plan_names(again) == ["toy[size=3]"]
    again.create_execution_plans([heur_mode.A])  # planned on, as any graph
    assert plan_names(again) == plan_names(g)


@settings(max_examples=15)
@given(whole.drawn(max_ops=8))
def test_any_whole_graph_computes_the_same(drawn):
    g, pack = drawn.build(), drawn.inputs()
    g.build([heur_mode.A])
    again = pygraph().deserialize(cpu(), g.serialize())
    results = []
    for one in (g, again):
        outputs = {t.name: torch.empty_strided(t.dim, t.stride).fill_(float("nan")) for t in one.frozen.outputs}
        one.execute(pack | outputs, graphs.workspace(one.get_workspace_size()))
        results.append(outputs)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_calling_forms():
    g = graphs.new()
    g.relu(g.tensor([10], name="x")).set_output().set_name("out")
    g.build([heur_mode.FALLBACK])
    blob = g.serialize()
    numbers = g.serialize(as_bytes=False)
    assert isinstance(numbers, list) and bytes(numbers) == blob
    for data in (blob, bytearray(blob), memoryview(blob), numbers):
        assert plan_names(pygraph(handle=cpu()).deserialize(data)) == ["reference"]
    for data in ("text", 7, None, [256], ["a"], [None]):
        with pytest.raises(GraphTypeError, match="deserialize: give the bytes that serialize"):
            pygraph().deserialize(data)
    for arguments in ((), (cpu(), blob, 1)):
        with pytest.raises(GraphTypeError, match="give data, or a handle and data"):
            pygraph().deserialize(*arguments)
    with pytest.raises(GraphTypeError, match="handle"):
        pygraph().deserialize("cpu", blob)
    with pytest.raises(GraphTypeError, match="key must be bytes"):
        g.serialize(key="secret")
    with pytest.raises(GraphTypeError, match="key must be bytes, at least one"):
        pygraph().deserialize(blob, key=b"")
    with pytest.raises(GraphTypeError, match="include_kernels: give True or False"):
        g.serialize(True, 1)


def test_states():
    g = graphs.new()
    with pytest.raises(GraphStateError, match="call build_plans"):
        g.serialize()
    g.relu(g.tensor([10])).set_output()
    g.validate(), g.build_operation_graph(), g.create_execution_plans([heur_mode.FALLBACK])
    with pytest.raises(GraphStateError, match="no plan is built"):
        g.serialize()
    g.build_plans()
    with pytest.raises(GraphStateError, match="has tensors: deserialize into a new pygraph"):
        g.deserialize(g.serialize())


def test_keys():
    g = toy_graph()
    blob = g.serialize(key=b"secret")
    assert plan_names(pygraph().deserialize(cpu(), blob, key=b"secret", **plugins())) == plan_names(g)
    for key, data in ((None, blob), (b"other", blob), (b"secret", g.serialize())):
        with pytest.raises(SerializedError, match="key"):
            pygraph().deserialize(cpu(), data, key=key, **plugins())


def head_of(blob: bytes) -> tuple[dict, tuple[bytes, ...]]:
    head, pieces = sealed.open_sealed(blob)
    return json.loads(head), pieces


def edited(blob: bytes, edit, pieces=None) -> bytes:
    """With a digest that agrees, as anybody can make it."""
    head, found = head_of(blob)
    edit(head)
    return sealed.seal(json.dumps(head).encode(), found if pieces is None else pieces)


def first(head: dict) -> dict:
    return head["plans"][0][0]


WRONG = {
    "engine": (lambda h: first(h).update(engine="none"), "part 0 is run by engine 'none', which is not here; there"),
    "knob": (lambda h: first(h)["knobs"].update(speed=3), "part 0: engine 'toy' has no knob speed; it has: size"),
    "type": (lambda h: first(h)["knobs"].update(size="3"), "part 0: engine 'toy': knob size is '3'; accepted: int"),
    "bool": (lambda h: first(h)["knobs"].update(size=True), "knob size is True; accepted: int"),
    "limit": (lambda h: first(h)["knobs"].update(size=101), "'toy' cannot run toy.size=101. on cpu: size is 101; acc"),
    "pattern": (lambda h: first(h).update(pattern="p"), "part 0: pattern 'p' does not match first here"),
    "match": (lambda h: first(h).update(match=1), "part 0: pattern 'solo_relu' does not match first here"),
    "facts": (lambda h: first(h).update(pattern=""), "part 0: engine 'toy' does not serve Subgraph; it serves Solo"),
    "nodes": (lambda h: first(h).update(nodes=[0, 2]), "part 0: nodes is .0, 2.; accepted: numbers of nodes in rising"),
    "negative": (lambda h: first(h).update(nodes=[-1]), "part 0: nodes is .-1.; accepted"),
    "no nodes": (lambda h: first(h).update(nodes=[]), "part 0: nodes is ..; accepted"),
    "missing part": (lambda h: h["plans"][0].pop(), "not planned: node 'second'"),
    "twice": (lambda h: h["plans"][0].append(h["plans"][0][0]), "node 'first' .* is planned twice"),
    "order": (lambda h: h["plans"][0].reverse(), "is read before node 'first' .* has run"),
    "no plan": (lambda h: h["plans"].clear(), "selected is 0; accepted: the place of one of its 0 plans"),
    "selected": (lambda h: h.update(selected=-1), "selected is -1; accepted"),
    "inference": (lambda h: h.update(key="0" * 64), "another one here: graphfuse .* inferred 0000"),
    "graph": (lambda h: h["graph"]["nodes"][1].update(op="abs"), "another one here"),
    "kernels": (lambda h: h["codes"].append({}), "describes 1 kernel and has 0"),
    "chip": (lambda h: h.update(kind="cuda", arch="sm_90a", device="H200"), "cuda sm_90a .H200., .* run on cpu; acc"),
    "field": (lambda h: h.pop("arch"), "has no arch"),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named(edit, message):
    g, into = toy_graph(), pygraph("mine")
    before = vars(into) | {}
    with pytest.raises(GraphfuseError, match=message):
        into.deserialize(cpu(), edited(g.serialize(), edit), **plugins())
    # It is empty, and can be used.
    assert not into.tensors and not into.nodes and into.name == "mine" and into.handle is None
    assert into.io_data_type is before["io_data_type"]
    assert plan_names(into.deserialize(cpu(), g.serialize(), **plugins())) == plan_names(g)


def test_a_plug_in_that_is_not_passed():
    blob = toy_graph().serialize()
    with pytest.raises(SerializedError, match="engine 'toy', which is not here; there are: rows, .*reference"):
        pygraph().deserialize(cpu(), blob)
    with pytest.raises(SerializedError, match="pattern 'solo_relu' does not match first here"):
        pygraph().deserialize(cpu(), blob, engines=plugins()["engines"])


def test_an_engine_that_declines_now():
    blob = toy_graph().serialize()
    with pytest.raises(SerializedError, match="cannot run toy.size=3. on cpu: not today"):
        declining = toys.HostSolo("toy", (3,), reason="not today")
        pygraph().deserialize(cpu(), blob, patterns=toys.solo("relu"), engines=[declining])


def test_knobs_without_a_json_form_are_not_written(monkeypatch):
    g = toy_graph()
    monkeypatch.setattr(recipe, "knobs_to_dict", lambda knobs: {"size": object()})
    with pytest.raises(SerializedError, match="engine 'toy': knob size is <object .*; accepted: bool, int"):
        g.serialize()


@settings(max_examples=200)
@given(st.data())
def test_flipped_and_truncated_bytes_are_refused(data):
    at = data.draw(st.integers(0, len(BLOB) - 1))
    mask = data.draw(st.integers(1, 255))
    end = data.draw(st.one_of(st.just(len(BLOB)), st.integers(0, len(BLOB))))
    damaged = (BLOB[:at] + bytes([BLOB[at] ^ mask]) + BLOB[at + 1 :])[:end]
    with pytest.raises(SerializedError):
        pygraph().deserialize(cpu(), damaged, **plugins())


@settings(max_examples=400)
@given(st.data())
def test_edited_fields_are_as_before_or_refused(data):
    """Also where the digest was made anew: what is accepted runs, and computes what the graph in it says."""
    head, pieces = head_of(BLOB)
    blob = sealed.seal(json.dumps(data.draw(edits.edits(head))).encode(), pieces)
    try:
        found = pygraph().deserialize(cpu(), blob, **plugins())
    except GraphfuseError:
        return
    x = torch.arange(10.0) - 5
    pack = {t.uid: x if t.id not in found.frozen.producer else torch.empty(t.dim) for t in found.frozen.bound}
    found.execute(pack, graphs.workspace(found.get_workspace_size()))
    want = pygraph.from_json(found.to_json(), cpu())
    want.build([heur_mode.FALLBACK])
    exact = {uid: value.clone() for uid, value in pack.items()}
    want.execute(exact, graphs.workspace(want.get_workspace_size()))
    assert all(torch.equal(exact[uid], pack[uid]) for uid in pack)


BLOB = toy_graph().serialize()


# Kernels


def emulated(**options) -> pygraph:
    g = Norm(**options).graph("emulator")
    g.build([heur_mode.OPENSOURCE])
    return g


@pytest.mark.compile
def test_the_emulator_runs_what_was_planned():
    case = Norm(rows=5)
    g, results = emulated(rows=5), []
    for one in (g, pygraph().deserialize(create_handle("emulator"), g.serialize())):
        outputs = case.outputs()
        one.execute(case.inputs() | outputs, graphs.workspace(one.get_workspace_size()))
        results.append(outputs["out"])
    assert torch.equal(*results)
    assert plan_names(one) == plan_names(g)[:1] and one.get_kernel_source_at_index(0) == g.get_kernel_source_at_index(0)
    with pytest.raises(SerializedError, match="was made for emulator, and is to run on cpu"):
        pygraph().deserialize(cpu(), g.serialize())


@pytest.mark.compile
def test_another_source_is_not_run():
    g = emulated(rows=5)
    handle = create_handle("emulator")
    message = "no code for kernel .* of rows.cu as it is here: graphfuse .* generated it from other sources"
    for name in ("source", "entry", "name"):
        other = edited(g.serialize(), lambda head, name=name: head["codes"][0].update({name: "0" * 64}))
        with pytest.raises(SerializedError, match=message):
            pygraph().deserialize(handle, other)
    assert head_of(g.serialize(include_kernels=False))[0]["codes"] is None
    pygraph().deserialize(handle, g.serialize(include_kernels=False))


class Mine(RowEngine):
    """An engine that a caller passes. text: what its sources end with."""

    name = "mine"

    def __init__(self, text: str):
        self.text = text

    def source(self, facts, knobs):
        return f"{super().source(facts, knobs)}// {self.text}\n"


@pytest.mark.compile
def test_another_source_of_a_plug_in_is_not_run():
    """That is no fault of the plug-in, and no reason to go on without it."""
    g = Norm(rows=5).graph("emulator")
    g.build([heur_mode.OPENSOURCE], engines=[Mine("one"), "mine"])
    handle = create_handle("emulator")
    assert plan_names(pygraph().deserialize(handle, g.serialize(), engines=[Mine("one")])) == plan_names(g)[:1]
    with pytest.raises(SerializedError, match="no code for kernel .* of mine.cu"):
        pygraph().deserialize(handle, g.serialize(), engines=[Mine("two")])


def ahead_of(case, **figures) -> Planner:
    """Plans of a case of a bench for an H200, which is not there."""
    g = case.graph()
    g.validate()
    return Planner(g.frozen, Handle(replace(for_arch("sm_90a"), **figures)), (), ())


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [name for name, bench in BENCHES.items() if bench.quick])
def test_recipes_of_every_bench_are_the_plans(name):
    for case in BENCHES[name].quick:
        planner = ahead_of(case)
        planner.create([heur_mode.B])
        for p in planner.plans[:20]:
            data = json.loads(json.dumps([part.to_data() for part in recipe.of(p, planner.regions)]))
            parts = tuple(recipe.PartRecipe.parse("part", one) for one in data)
            new = ahead_of(case)
            again = recipe.rebuild(parts, new.graph, new.regions, new.registry.engines, new.device)
            assert again.name == p.name and again.parts == p.parts and again.sources == p.sources
            assert [part.outline for part in again.parts] == [part.outline for part in p.parts]
            assert (again.placed, again.scratch, again.workspace_bytes) == (p.placed, p.scratch, p.workspace_bytes)


def test_a_chip_of_the_same_architecture_with_fewer_processors():
    (case, *_) = BENCHES["rmsnorm-backward"].cases
    planner, small = ahead_of(case), ahead_of(case, sm_count=8)
    planner.create([heur_mode.OPENSOURCE])
    found = recipe.of(planner.plans[0], planner.regions)
    with pytest.raises(SerializedError, match="part 0: engine 'rows' cannot run .*: ctas is .*; accepted: up to "):
        recipe.rebuild(found, small.graph, small.regions, small.registry.engines, small.device)


LOADED = """
import sys
from dataclasses import replace
import graphfuse
from graphfuse.base.device import for_arch
from graphfuse.runtime import cache, launch
from graphfuse.runtime.handle import Handle

class Kernel:
    def __init__(self, cubin): self.cubin = cubin
    def launcher(self, launch, dependent): return self

launch.load = lambda cubin, entry, device: LOADED.append((cubin, entry)) or Kernel(cubin)
LOADED = []
blob = open(sys.argv[1], "rb").read()
g = graphfuse.pygraph().deserialize(Handle(replace(for_arch("sm_90a"), here=True)), blob)
assert g.serialize() == blob
(found,) = {cubin for cubin, _ in LOADED}
assert found[:4] == b"\\x7fELF" and found in blob
print(vars(cache.statistics()), cache._kernels, g.get_plan_name_at_index(0))
print([m for m in ("torch", "cuda.bindings.nvrtc", "cuda.core") if m in sys.modules])
"""
"""Of a device that is said to be here no kernel can be loaded; what would be is looked at instead."""


@pytest.fixture
def ahead(tmp_path):
    """A file of ``graphfuse compile --output``."""
    from typer.testing import CliRunner

    from graphfuse import cli

    file = tmp_path / "norm.plan"
    arguments = ("compile", "rmsnorm-silu", "--case", "bf16 1560x64", "--arch", "sm_90a", "--output", str(file))
    done = CliRunner().invoke(cli.app, list(arguments))
    assert done.exit_code == 0, done.output
    assert f"written: {file}" in done.output
    return file


@pytest.mark.compile
def test_a_new_process_compiles_nothing(ahead, tmp_path, monkeypatch):
    """Nor does it look for kernels in a cache, or for a compiler."""
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "empty"))
    done = subprocess.run([sys.executable, "-c", LOADED, str(ahead)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts, modules = done.stdout.splitlines()
    assert counts.startswith("{'compiled': 0, 'memory_hits': 0, 'disk_hits': 0} OrderedDict() rows[")
    assert modules == "[]" and not (tmp_path / "empty").exists()


@pytest.mark.compile
def test_no_code_is_loaded_that_should_not_be(ahead, monkeypatch):
    from graphfuse.runtime import launch

    monkeypatch.setattr(launch, "load", lambda *_: pytest.fail("it was loaded"))
    blob = ahead.read_bytes()
    (_, (cubin,)), here = head_of(blob), Handle(replace(for_arch("sm_90a"), here=True))
    at = blob.index(cubin) + len(cubin) // 2
    wrong = [
        (blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], here, "digest does not agree"),
        (blob, Handle(for_arch("sm_100a")), r"made for cuda sm_90a .H200., and is to run on cuda sm_100a .B200."),
        (blob, cpu(), "made for cuda sm_90a .H200., and is to run on cpu"),
        (edited(blob, lambda h: None, (b"",)), here, "kernel 0 is no machine code"),
        (edited(blob, lambda h: None, (cubin, cubin)), here, "describes 1 kernel and has 2"),
        (edited(blob, lambda h: h["codes"][0].update(source="0")), here, "no code for kernel"),
        (edited(blob, lambda h: h.update(codes=None), ()), Handle(for_arch("sm_120")), "made for cuda sm_90a"),
    ]
    for data, handle, message in wrong:
        with pytest.raises(SerializedError, match=message):
            pygraph().deserialize(handle, data)


@pytest.mark.compile
def test_kernels_that_have_to_be_there():
    """As cuDNN's enforce_precompiled asks for."""
    g = Norm(rows=5).graph("emulator")
    g.build([heur_mode.OPENSOURCE])
    handle = create_handle("emulator")
    assert plan_names(pygraph().deserialize(handle, g.serialize(), enforce_precompiled=True)) == plan_names(g)[:1]
    with pytest.raises(SerializedError, match="has no kernels; accepted with enforce_precompiled"):
        pygraph().deserialize(handle, g.serialize(include_kernels=False), enforce_precompiled=True)
    with pytest.raises(GraphTypeError, match="enforce_precompiled: give True or False, got 1"):
        pygraph().deserialize(handle, g.serialize(), enforce_precompiled=1)


@pytest.mark.compile
@settings(max_examples=100)
@given(st.data())
def test_edited_plans_of_kernels_are_refused_or_the_kernel_itself(data):
    """Knobs, above all, which decide what a launch takes."""
    head, pieces = head_of(emulated_blob())
    plans = data.draw(edits.edits(head["plans"]))
    blob = sealed.seal(json.dumps(head | {"plans": plans}).encode(), pieces)
    try:
        found = pygraph().deserialize(create_handle("emulator"), blob)
    except GraphfuseError:
        return
    case = Norm(rows=5)
    got, want = case.outputs(), case.outputs()
    found.execute(case.inputs() | got, graphs.workspace(found.get_workspace_size()))
    pygraph().deserialize(create_handle("emulator"), emulated_blob()).execute(case.inputs() | want)
    assert torch.equal(got["out"], want["out"])


@functools.cache
def emulated_blob() -> bytes:
    return emulated(rows=5).serialize()


def test_a_graph_that_is_lowered_otherwise_is_another_one(monkeypatch):
    """Recipes number the nodes of the lowered graph."""
    g = graphs.new(device="emulator")
    g.reduction(g.tensor([3, 8, 5, 6]), mode=reduction_mode.ADD).set_dim([1, 8, 1, 1]).set_output()
    g.build([heur_mode.A])
    blob = g.serialize()
    monkeypatch.setattr("graphfuse.op_graph.lower.split_reductions", lambda graph: graph)
    with pytest.raises(SerializedError, match="serialize it anew"):
        graphs.new(device="emulator").deserialize(blob)
