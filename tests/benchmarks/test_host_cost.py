"""The bench of the host's cost: which calls, on which addresses, what is absent, what the record says."""

import ctypes
import itertools
import json
import mmap
import subprocess
import sys

import pytest
import torch

from graphfuse.base.device import for_arch
from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import bare, host_calls, host_cost, host_record, row_counts
from graphfuse.benchmarks.programs.host_calls import NORM, SILU, Call, Sets
from graphfuse.benchmarks.programs.host_record import BARE, HostCost
from graphfuse.runtime.handle import Handle
from support import bench_record


def nothing() -> None:
    """The CPU has nothing to wait for."""


@pytest.fixture
def sets() -> Sets:
    return Sets.make(3, "cpu", 4, 64)


@pytest.fixture(scope="module")
def ready() -> dict[str, Call]:
    """Those that run on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cost, "PEERS", {})
        ready, absent = host_cost.found(Sets.make(3, "cpu", 4, 64), ())
    assert {*absent} == {host_calls.LAUNCHES}
    return ready


def test_every_call_of_ours_and_torchs_makes_the_norm(ready):
    names = (host_record.MODULE, host_record.TORCH, host_record.LLAMA, "F.rms_norm")
    manners = [host_record.manner(n, how) for n in names for how in (host_record.KEPT, host_record.BACKWARD)]
    graphs = [
        f"graph.{what}" for what in ("bind", *(f"execute{how}" for how in ("", ", handle", ", uids", ", new dict")))
    ]
    functions = ["functional.rmsnorm", "functional.rmsnorm, out=", "functional.fused_rmsnorm_silu"]
    assert {*names, *manners, *graphs, *functions} <= set(ready)
    assert all(call.gradients == name.endswith(host_record.BACKWARD) for name, call in ready.items())


def test_each_call_works_on_a_set_of_its_own(ready):
    for name, call in ready.items():
        assert len(call.arguments) == 3, name
        if name == "graph.bind":
            continue
        tensors = [[*each[0].values()] if isinstance(each[0], dict) else each for each in call.arguments]
        first = {next(t for t in each if isinstance(t, torch.Tensor)).data_ptr() for each in tensors}
        assert len(first) == 3, name


def test_bound_calls_write_to_their_own_sets(sets):
    call = next(c for c in host_calls.graphs(sets) if c.name == "graph.bind")
    for out, given in zip(sets.out, call.arguments, strict=True):
        out.fill_(float("nan"))
        call.call(*given)
        assert not out.isnan().any()


def test_backward_leaves_no_gradients(sets):
    weight = torch.nn.Parameter(sets.weight.clone())
    seen = []

    def norm(x):
        y = torch.nn.functional.rms_norm(x, (64,), weight, sets.eps)
        y.register_hook(seen.append)
        return y

    call = host_calls.backward("norm", norm, weight, sets)
    call.call(*call.arguments[2])
    assert torch.equal(seen[0], sets.dy[2])
    assert weight.grad is None and sets.leaves[2].grad is None
    assert sets.leaves[2].data_ptr() == sets.x[2].data_ptr()


def test_kept_outputs_lie_elsewhere(sets):
    plain, kept, _ = host_calls.manners("norm", lambda x: x + 1, torch.nn.Parameter(sets.weight), sets)
    places = [kept.call(*kept.arguments[i % 3]).data_ptr() for i in range(host_calls.RING)]
    assert len(set(places)) == host_calls.RING
    assert plain.call is not kept.call and plain.arguments is kept.arguments


@pytest.mark.parametrize(
    "makes, result",
    [
        (NORM, lambda s: s.x[0]),
        (NORM, lambda s: None),  # and nothing is written
        (NORM, lambda s: torch.nn.functional.rms_norm(s.x[0], (64,), None, s.eps)),
        (SILU, lambda s: torch.nn.functional.rms_norm(s.x[0], (64,), s.weight, s.eps)),
    ],
)
def test_a_call_that_does_something_else_is_wrong(sets, makes, result):
    assert sets.wrong(Call("call", lambda x: result(sets), sets.rows, makes=makes)).startswith("wrong result")


def test_what_fails_is_absent_with_its_reason(monkeypatch):
    def broken(sets):
        raise RuntimeError("no library\nhere")

    def half(sets):
        return [
            Call("right", lambda x: torch.nn.functional.rms_norm(x, (1024,), sets.weight, sets.eps), sets.rows),
            Call("wrong", lambda x: x, sets.rows),
            Call("refused", lambda x: x.no_such_thing, sets.rows),
            Call(BARE, lambda x: torch.nn.functional.rms_norm(x, (1024,), sets.weight, sets.eps), sets.rows),
        ]

    monkeypatch.setattr(host_calls, "OURS", {"half": half})
    monkeypatch.setattr(host_cost, "PEERS", {"broken": broken})
    by_sets = host_cost.measured((1, 2), (), 3, "cpu", nothing)
    rows = by_sets[2]
    assert by_sets.keys() == {1, 2} and by_sets[1].keys() == rows.keys()
    assert rows["broken"] == {"absent": "RuntimeError: no library"}
    assert rows["wrong"]["absent"].startswith("wrong result")
    assert rows["refused"]["absent"].startswith("AttributeError")
    assert 0.1 < rows["right"]["ratio"] < 10 and rows[BARE]["ratio"] == 1.0 and rows["right"]["over"] == {}
    assert set(host_cost.measured((2,), ("wrong",), 3, "cpu", nothing)[2]) == {"broken", "wrong", BARE}
    content = host_cost.table({1: {"a": rows["right"], "b": rows["broken"]}, 16: {"a": rows["right"]}})
    assert content == [
        {"name": "a", "sets": {"1": rows["right"], "16": rows["right"]}},
        {"name": "b", "absent": "RuntimeError: no library"},
    ]


def slow(sets: Sets) -> list[Call]:
    """The norm of torch, and one that takes as long again and more."""
    import time

    def norm(x):
        return torch.nn.functional.rms_norm(x, (1024,), sets.weight, sets.eps)

    def waiting(x):
        time.sleep(1e-3)
        return norm(x)

    return [Call(host_record.manner(host_record.TORCH, host_record.KEPT), norm, sets.rows),
            Call(host_record.manner(host_record.MODULE, host_record.KEPT), waiting, sets.rows)]  # fmt: skip


def test_calls_are_compared_round_by_round(monkeypatch):
    monkeypatch.setattr(host_calls, "OURS", {"slow": slow})
    monkeypatch.setattr(host_cost, "PEERS", {})
    monkeypatch.setattr(host_cost, "CALLS", 8)
    rows = host_cost.measured((2, host_record.FEW_SETS), (), 3, "cpu", nothing)
    fast, late = (host_record.manner(n, host_record.KEPT) for n in (host_record.TORCH, host_record.MODULE))
    assert rows[2][late]["over"].keys() == {fast, host_record.FEW} and rows[2][fast]["over"].keys() == {host_record.FEW}
    assert rows[2][late]["over"][fast] > 3 and 0.2 < rows[2][late]["over"][host_record.FEW] < 5
    assert rows[2][late]["ratio"] is None


@pytest.mark.parametrize("count, gradients, calls", [(1, False, 200), (256, False, 200), (256, True, 60)])
def test_every_set_has_its_turn(count, gradients, calls):
    seen: list[int] = []
    waits: list[int] = []
    call = Call("call", seen.append, [(i,) for i in range(count)], gradients)
    turn = itertools.cycle(call.arguments)
    for _ in range(3):
        host_cost._sample(call, turn, lambda: waits.append(len(seen)))
    assert seen == [i % count for i in range(3 * calls)]
    assert waits == [0, calls, calls, 2 * calls, 2 * calls, 3 * calls]


@pytest.mark.compile
def test_a_bare_launch_has_the_plans_arguments(sets):
    made, _ = _planned(sets)
    kernel = bare.started(made, sets.packs())
    (part,) = made._plan(0).parts
    assert kernel.cubin[:4] == b"\x7fELF" and (kernel.grid, kernel.block) == (part.outline.grid, part.outline.block)
    assert len(kernel.arguments) == 3
    for i, arguments in enumerate(kernel.arguments):
        pointers = {a.value for a in arguments if isinstance(a, ctypes.c_void_p)}
        assert pointers == {t.data_ptr() for t in sets.pack(i).values()}
        assert [a.value for a in arguments if isinstance(a, ctypes.c_float)] == [pytest.approx(sets.eps)]


def _planned(sets: Sets):
    """The graph of host_calls as it is planned for a GPU, which takes none."""
    made = host_calls.drawn(sets, Handle(for_arch("sm_90a")))
    graph = made[0]
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans()
    return made


def test_row_counts_in_turn_are_all_of_them(monkeypatch):
    seen: dict[str, list] = {"rows": [], "places": []}

    def norms(columns, device):
        def norm(x):
            seen["rows"].append(len(x))
            seen["places"].append(x.data_ptr())

        return {"norm": norm}

    monkeypatch.setattr(row_counts, "norms", norms)
    (row,) = row_counts.in_turn("cpu", nothing, 2, 32)
    assert row["name"] == "norm" and row["ratio"] > 0
    passes = [seen["rows"][i : i + 32] for i in range(0, len(seen["rows"]), 32)]
    assert len(passes) == 6  # one that does not count and two that do, of both
    same = [p for p in passes if set(p) == {16}]
    assert len(same) == 3 and all(sorted(p) == [*range(1, 33)] for p in passes if p not in same)
    assert len(set(seen["places"])) == 32  # the same places for both


def test_unseen_row_counts_are_called_once():
    calls: list[int] = []
    found = row_counts._unseen(calls.append, lambda count: count, nothing, 10, 64)
    assert calls[:64] == [*range(2, 65, 2)] * 2
    new = [n for n in calls if n % 2]
    assert len(new) == len(set(new)) == 10 and not set(new) & set(calls[:64])
    assert len([n for n in calls[64:] if n % 2 == 0]) == 10
    assert found["ratio"] == pytest.approx(found["new"]["median"] / found["seen"]["median"], rel=0.01, abs=0.01)


def test_ours_run_with_changing_row_counts():
    assert [r["name"] for r in row_counts.unseen("cpu", nothing, 2, 8)] == [host_record.FUNCTIONAL, host_record.MODULE]
    assert len(row_counts.in_turn("cpu", nothing, 2, 4)) == 3


@pytest.mark.further
def test_what_calls_leave_is_seen(monkeypatch):
    held = []

    def leaking(columns, device):
        return {host_record.FUNCTIONAL: lambda x: held.append(fresh())}

    def fresh():  # memory that nobody had before
        made = mmap.mmap(-1, 1 << 20)
        made.write(b"x" * (1 << 20))
        return made

    (row,) = row_counts.growth("cpu", nothing, 9, 16, 4)
    assert row["calls"] == 8 and sum(row["by_quarter"]) == row["host_bytes"]
    monkeypatch.setattr(row_counts, "norms", leaking)
    (row,) = row_counts.growth("cpu", nothing, 80, 16, 4)
    assert 60e6 < row["host_bytes"] < 120e6 and row["device_bytes"] == 0


def test_shapes_are_inside_of_the_buffer():
    import random

    buffer = torch.zeros(2 * 8 * 2048, dtype=torch.bfloat16)
    shapes = row_counts._shapes(random.Random(1), buffer, 8)
    found = [next(shapes) for _ in range(300)]
    assert {x.shape[0] for x in found} == {*range(1, 9)} and {x.shape[1] for x in found} == set(row_counts.WIDTHS)
    assert len({x.data_ptr() for x in found}) > 200 and all(x.data_ptr() % 16 == 0 for x in found)


def test_targets():
    content = bench_record.host_cost()
    found = {t.text: t.verdict(HostCost(content)) for t in host_record.TARGETS}
    assert all(v.value is not None for v in found.values()) and len(found) == 12
    (functional,) = (v for t, v in found.items() if t == "functional.rmsnorm over bare cuLaunchKernel, at worst")
    assert functional.value == 3.0 and functional.met is False
    row = next(c for c in content["calls"] if c["name"] == host_record.FUNCTIONAL)
    row["sets"]["2000"]["ratio"] = 3.6
    row["sets"]["2000"]["over"][host_record.FEW] = 1.2
    found = {t.text: t.verdict(HostCost(content)) for t in host_record.TARGETS}
    worst = found["functional.rmsnorm over bare cuLaunchKernel, at worst"]
    assert worst.value == pytest.approx(3.6) and worst.where == "2000 address sets"
    steady = found["functional.rmsnorm: 2000 address sets over 16"]
    assert steady.value == pytest.approx(1.2) and steady.met is False
    content["memory"][0]["host_bytes"] = 3_000_000
    (left,) = (t.verdict(HostCost(content)) for t in host_record.TARGETS if "MB left" in t.text)
    assert (left.value, left.met) == (3.0, False)
    few = {key: content[key] for key in ("problem",)} | {"calls": []}
    assert all(t.verdict(HostCost(few)).met is None for t in host_record.TARGETS)
    assert not host_record.every(HostCost(few))


def test_a_run_on_the_cpu_says_what_came_out(capsys, monkeypatch):
    monkeypatch.setattr(host_calls, "OURS", {"functional": host_calls.functions})
    monkeypatch.setattr(host_cost, "PEERS", {})
    monkeypatch.setattr(host_cost, "CALLS", 4)
    arguments = host_cost.parser().parse_args(["--quick", "--sets", "1,3", "--parts", "addresses"])
    content = host_cost.run(arguments, "cpu", nothing)
    assert json.loads(json.dumps(content)) == content and content["problem"]["sets"] == [1, 3]
    assert {*content["calls"][0]["sets"]} == {"1", "3"}
    host_cost.STUDY.report(content)
    out = capsys.readouterr().out
    assert "address sets: measured in" in out and "functional.rmsnorm, out=" in out and "not measured" in out
    assert tables.markdown(host_record.addresses(HostCost(content))).count("\n") == len(content["calls"]) + 1


def test_without_a_bare_launch_there_is_no_record(monkeypatch):
    monkeypatch.setattr(host_cost, "measured", lambda *a: {16: {host_calls.LAUNCHES: {"absent": "refused"}}})
    arguments = host_cost.parser().parse_args(["--parts", "addresses"])
    with pytest.raises(SystemExit, match="no bare launch to compare with: {'absent': 'refused'}"):
        host_cost.run(arguments, "cuda", nothing)


@pytest.mark.parametrize(
    "arguments, whole",
    [
        ([], True),
        (["--rounds", "3"], True),
        (["--sets", "1,16,256,2000,4000"], True),
        (["--sets", "1,16"], False),
        (["--only", "functional"], False),
        (["--parts", "rows"], False),
        (["--quick"], False),
    ],
)
def test_a_part_is_no_whole(arguments, whole):
    assert host_cost.whole(host_cost.parser().parse_args(arguments)) is whole


@pytest.mark.parametrize(
    "arguments, said", [(["--help"], "--only"), (["--sets", "0"], "--sets"), (["--parts", "x"], "rows")]
)
def test_the_command_line(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "graphfuse.benchmarks.programs.host_cost", *arguments], capture_output=True, text=True
    )
    assert done.returncode == (0 if arguments == ["--help"] else 2) and said in done.stdout + done.stderr
