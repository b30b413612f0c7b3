"""Benches without a GPU: cases and their judgement, sessions by the wall clock, figures, tables, plots, docs."""

import copy
import functools
import json
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bench_record
from graphfuse import cli, heur_mode, record, settings
from graphfuse.benchmarks import command, plot, render, rmsnorm_backward, rmsnorm_training, session, tables, target
from graphfuse.benchmarks.add_rmsnorm import Case as AddCase
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.peer import Peer, Work, overwriting
from graphfuse.benchmarks.peers import flashinfer, graphfuse, stream, torch_eager
from graphfuse.benchmarks.qk_norm import Case as QkCase
from graphfuse.benchmarks.results import MB, Results
from graphfuse.benchmarks.rmsnorm_silu import Case
from graphfuse.device import for_arch
from graphfuse.runtime.handle import Handle, create_handle
from graphfuse.runtime.timing import Time
from graphfuse.tuning.sizes import OUTPUTS

ROOT = Path(__file__).resolve().parent.parent
BENCH = BENCHES["rmsnorm-silu"]
SMALL = [Case(33, 64, output) for output in OUTPUTS]


def test_the_seeds_sizes():
    assert len(set(BENCH.cases)) == 120
    assert len(BENCH.quick) == 12 and set(BENCH.quick) <= set(BENCH.cases)


@pytest.mark.parametrize("output, each", [("bf16", 4), ("fp8_e4m3", 3), ("nvfp4", 2 + 0.5 + 1 / 16)])
def test_bytes_are_those_of_the_tensors(output, each):
    case = Case(48, 160, output)
    (operands,) = case.sets(1, "cpu")
    tensors = [t for t in (operands.x, operands.weight, operands.out, operands.scales) if t is not None]
    assert case.moved == sum(t.numel() * t.itemsize for t in tensors) == 48 * 160 * each + 320


# What is right and what is wrong


def made(peer: Peer, case: Case, count: int = 2):
    sets = case.sets(count, "cpu")
    return sets, peer.make(case, sets)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("peer", [graphfuse.PEER, torch_eager.RMSNORM_SILU, stream.PEER], ids=lambda p: p.name)
def test_peers_compute_the_case(peer, case):
    if peer.why_absent(case, 90):
        pytest.skip(peer.why_absent(case, 90))
    sets, work = made(peer, case)
    assert len(work.calls) == 2
    assert session.checked(case, sets[0], work, peer.tight) is None


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_result_is_seen(case, tight):
    (operands,) = sets = case.sets(1, "cpu")
    work = graphfuse.PEER.make(case, sets)
    nothing = Work([lambda: None])
    assert "wrong result: 2112 of 2112" in session.checked(case, operands, nothing, tight)
    work.calls[0]()
    assert case.wrong(operands, tight) is None
    item = operands.out.view(torch.uint8)
    before = item[32, 3].item()
    item[32, 3] = before ^ 0x44  # exponent bits of both nibbles
    assert "first in row 32" in case.wrong(operands, tight)
    item[32, 3] = before
    operands.eps = 1.0
    assert case.wrong(operands, tight)


def test_our_own_result_is_held_to_one_rounding():
    case, (operands,) = SMALL[0], SMALL[0].sets(1, "cpu")
    graphfuse.PEER.make(case, [operands]).calls[0]()
    operands.out[0] *= 1 + 2**-6
    assert case.wrong(operands, tight=True) and case.wrong(operands, tight=False) is None


def test_the_last_row_is_always_checked():
    case = Case(9000, 64, "bf16")
    (operands,) = case.sets(1, "cpu")
    graphfuse.PEER.make(case, [operands]).calls[0]()
    operands.out[-1] = 0
    assert "row 8999" in case.wrong(operands, tight=False)


# Residual add, QK-norm

NEW = [b for b in BENCHES.values() if b is not BENCH]
SMALL_ADD = [AddCase(5, 96, output) for output in ("bf16", "fp8_e4m3")]
QK = QkCase(5, 4, 2)
BACKWARD = (rmsnorm_backward.BENCH, rmsnorm_backward.RESIDUAL_BENCH)
SMALL_BACKWARD = [rmsnorm_backward.Case(37, 96, output) for output in rmsnorm_backward.TYPES]
SMALL_BACKWARD += [rmsnorm_backward.ResidualCase(1100, 24, "bf16")]
SMALL_TRAINING = [rmsnorm_training.Case(37, 96, output) for output in rmsnorm_training.TYPES]


@pytest.mark.parametrize("bench", NEW, ids=lambda b: b.name)
def test_every_case_is_one_kernel(bench):
    """Of QK-norm one for Q and one for K, or one for both; of training one in each phase."""
    assert len(set(bench.cases)) == len(bench.cases) and set(bench.quick) <= set(bench.cases)
    for case in bench.cases:
        graphs = {case.graph: 2 if bench.name == "qk-norm" else 1}
        graphs |= {graph: 1 for name in ("joint_graph", "inference_graph") if (graph := getattr(case, name, None))}
        for graph, kernels in graphs.items():
            made = graph(Handle(for_arch("sm_90a")))  # planning needs no GPU
            made.validate()
            made.build_operation_graph()
            made.create_execution_plans([heur_mode.OPENSOURCE])
            name = "rmsnorm_backward[" if bench in BACKWARD else "rmsnorm["
            assert made.get_plan_name_at_index(0).count(name) == made.get_plan_name_at_index(0).count("[") == kernels
            assert (made.get_workspace_size_plan_at_index(0) > 0) == (bench in BACKWARD), case


def test_the_sizes_asked_for():
    sizes = {(c.rows, c.columns) for c in BENCHES["add-rmsnorm"].cases}
    assert len(sizes) == 28 and {(4096, 1024), (32768, 32768), (1, 3584)} <= sizes
    assert {(c.rows, c.columns) for c in BENCHES["add-rmsnorm-fp8"].cases} < sizes


@pytest.mark.parametrize(
    "case", [*SMALL_ADD, *SMALL_BACKWARD, *SMALL_TRAINING], ids=lambda c: f"{type(c).__name__} {c.output}"
)
def test_added_bytes_are_those_of_the_tensors(case):
    (operands,) = case.sets(1, "cpu")
    assert case.moved == sum(t.numel() * t.itemsize for t in operands.pack().values())


def test_bytes_of_heads_are_read_and_written():
    (operands,) = QK.sets(1, "cpu")
    assert QK.moved == sum(t.numel() * t.itemsize for t in operands.pack().values())


@pytest.mark.parametrize("case", SMALL_BACKWARD, ids=lambda c: f"{type(c).__name__} {c.output}")
def test_gradients_are_judged(case):
    for peer in (graphfuse.PEER, stream.PEER):  # torch's own kernel is on GPUs alone
        sets, work = made(peer, case)
        assert session.checked(case, sets[0], work, peer.tight) is None, peer.name
    (operands,) = case.sets(1, "cpu")
    dx, dweight = torch_eager.rmsnorm_backward(
        operands.dy, operands.x, operands.weight, operands.inverse_rms, operands.residual
    )
    operands.dx.copy_(dx), operands.dweight.copy_(dweight)
    assert case.wrong(operands, tight=True) is None
    operands.dweight[3] += 10
    assert "wrong dweight: 1 of " in case.wrong(operands, tight=False)
    operands.dx[case.rows - 1, 5] += 0.5
    assert f"wrong dx: 1 of {case.rows * case.columns} values checked, first in row {case.rows - 1}, " in case.wrong(
        operands, tight=False
    )


@pytest.mark.parametrize("case", SMALL_TRAINING, ids=lambda c: c.output)
@pytest.mark.parametrize("peer", [graphfuse.PEER, graphfuse.INFERENCE, stream.PEER], ids=lambda p: p.name)
def test_both_phases_compute_the_case(peer, case):
    sets, work = made(peer, case)
    assert session.checked(case, sets[0], work, peer.tight) is None
    assert bool(sets[0].inverse_rms.isnan().all()) == (peer is not graphfuse.PEER)  # who does not write it


@pytest.mark.emulate
@pytest.mark.parametrize("case", SMALL_TRAINING, ids=lambda c: c.output)
def test_our_kernels_of_both_phases_are_right(case):
    (operands,) = case.sets(1, "cpu")
    for graph, s in ((case.graph, operands), (case.inference_graph, replace(operands, inverse_rms=None))):
        work = graphfuse.work(graph(create_handle("emulator")), [s.pack()])
        case.spoil(operands)
        work.calls[0]()
        assert case.wrong(s, tight=True) is None


@pytest.mark.parametrize("case", SMALL_TRAINING, ids=lambda c: c.output)
@pytest.mark.parametrize("peer", [graphfuse.PEER, graphfuse.INFERENCE], ids=lambda p: p.name)
def test_a_wrong_inverse_rms_or_row_is_seen(peer, case):
    sets, work = made(peer, case, 1)
    (operands,) = sets
    check = work.check or (lambda: case.wrong(operands, tight=True))
    assert session.checked(case, operands, Work([lambda: None], check=work.check), False).startswith("wrong ")
    work.calls[0]()
    assert check() is None
    operands.inverse_rms[36] *= 1 + 2**-12  # which inference does not have
    assert ("inverse RMS: 1 of 37 values checked, first in row 36" in (check() or "")) == (peer is graphfuse.PEER)
    work.calls[0]()
    operands.y[36, 95] *= 1 + 2**-6
    assert "wrong y: 1 of 3552 values checked, first in row 36, column 95" in check()


@pytest.mark.parametrize("case", rmsnorm_training.BENCH.cases, ids=str)
def test_the_phases_are_compared_with_the_same_knobs(case):
    """Or the target would tell of knobs, as where one phase alone is tuned."""
    plans = []
    for graph in (case.graph, case.inference_graph):
        made = graph(Handle(for_arch("sm_90a")))
        made.validate()
        made.build_operation_graph()
        made.create_execution_plans([heur_mode.OPENSOURCE])
        plans.append((made.get_plan_name_at_index(0), *(part.why for part in made._plan(0).parts)))
    assert plans[0] == plans[1]


def test_the_training_phase_is_held_to_the_inference_phase():
    (goal,) = rmsnorm_training.BENCH.targets
    r = Results(bench_record.record("rmsnorm-training"))
    for case in r.cases():
        case["peers"]["graphfuse_inference"]["us"] = case["peers"]["graphfuse"]["us"]
    assert goal.verdict(r).value == 1 and goal.verdict(r).met
    slow = r.record["cases"][3]["peers"]
    slow["graphfuse"] = {"us": {"median": 1.03 * slow["graphfuse_inference"]["us"]["median"]}}
    found = goal.verdict(r)
    assert (found.met, found.where, found.value) == (False, "bf16 4096x8192", pytest.approx(1.03))
    assert r.best_peer(r.record["cases"][3]) == "quack"  # never our other phase


ADDING = {"bf16": torch_eager.ADD_RMSNORM, "fp8_e4m3": torch_eager.ADD_RMSNORM_FP8}


@pytest.mark.parametrize("case", SMALL_ADD, ids=lambda c: c.output)
def test_peers_add(case):
    for peer in (graphfuse.PEER, ADDING[case.output], stream.PEER):
        sets, work = made(peer, case)
        assert session.checked(case, sets[0], work, peer.tight) is None, peer.name
        assert len({id(s.out) for s in sets}) == 2  # what a peer makes itself replaces nothing of the case's


def test_eager_torch_normalizes_heads():
    sets, work = made(torch_eager.QK_NORM, QK)
    assert session.checked(QK, sets[0], work, False) is None
    assert torch.equal(sets[0].x, sets[0].before)


@pytest.mark.emulate
@pytest.mark.parametrize("joint", [False, True])
def test_our_kernels_normalize_heads_in_place(joint):
    sets = QK.sets(2, "cpu")
    handle = create_handle("emulator")
    graph, packs = QK.graph(handle), [s.pack() for s in sets]
    if joint:
        graph, packs = QK.joint_graph(handle), [s.joint_pack() for s in sets]
    work = graphfuse.work(graph, packs)
    assert work.note.count("rmsnorm[") == (1 if joint else 2) and work.knobs_from
    assert session.checked(QK, sets[0], work, tight=True) is None
    for _ in range(20):
        work.calls[0]()
    assert sets[0].q.float().square().mean().item() == pytest.approx(1, abs=0.01)  # again and again, and yet not worn


@pytest.mark.emulate
@pytest.mark.parametrize("case", SMALL_ADD, ids=lambda c: c.output)
def test_our_kernel_adds(case):
    sets = case.sets(1, "cpu")
    work = graphfuse.work(case.graph(create_handle("emulator")), [sets[0].pack()])
    assert session.checked(case, sets[0], work, tight=True) is None


def in_place(s) -> None:
    """As FlashInfer does it."""
    s.sum += s.out
    s.out.copy_(torch.nn.functional.rms_norm(s.sum, s.weight.shape, s.weight, s.eps))


def test_who_writes_over_its_inputs_is_judged_by_the_first_call():
    case = SMALL_ADD[0]
    sets = case.sets(1, "cpu")
    given = sets[0].x.clone(), sets[0].residual.clone()
    work = overwriting(case, sets, in_place, out="x", sum="residual")
    assert session.checked(case, sets[0], work, False) is None
    work.calls[0]()
    assert "wrong sum" in work.check()  # of the second, as its inputs are the first one's results
    assert torch.equal(given[0], sets[0].x) and torch.equal(given[1], sets[0].residual)
    for wrong in (lambda s: None, lambda s: s.out.zero_()):
        assert "wrong" in session.checked(case, sets[0], overwriting(case, sets, wrong, out="x", sum="residual"), False)


@pytest.mark.parametrize("case", SMALL_ADD, ids=lambda c: c.output)
@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_sum_or_row_is_seen(case, tight):
    sets, work = made(graphfuse.PEER, case, 1)
    (operands,) = sets
    assert "wrong sum: 480 of 480" in session.checked(case, operands, Work([lambda: None]), tight)
    work.calls[0]()
    assert case.wrong(operands, tight) is None
    for tensor, said in ((operands.sum, "wrong sum"), (operands.out, "wrong result")):
        bits = tensor.view(torch.uint8)
        before, last = bits.clone(), bits[4, -1].item()
        bits[4, -1] = last ^ 0x24
        assert f"{said}: 1 of 480 values checked, first in row 4, column 95" in case.wrong(operands, tight)
        bits.copy_(before)
    operands.eps = 1.0
    assert "wrong result" in case.wrong(operands, tight)


def test_a_wrong_head_is_seen():
    (operands,) = sets = QK.sets(1, "cpu")
    assert "wrong result" in session.checked(QK, operands, Work([lambda: None]), False)
    right = torch_eager.qk_norm(operands.q, operands.k, operands.q_weight, operands.k_weight, operands.eps)

    def write(s, q, k) -> None:
        s.q.copy_(q), s.k.copy_(k)

    assert session.checked(QK, operands, Work([lambda: write(sets[0], *right)]), False) is None
    operands.x[2, -1] += 1
    assert "wrong V: 1 of 1280" in QK.wrong(operands, False)
    swapped = Work([lambda: write(sets[0], right[0], -right[1])])
    assert "wrong result" in session.checked(QK, operands, swapped, False)


def test_ways_are_compared_with_their_own():
    def record(bench: str, **us) -> Results:
        made = Results(bench_record.record(bench))
        for case in made.cases():
            case["peers"] |= {name: {"us": {"median": t, "low": t, "high": t}} for name, t in us.items()}
        return made

    r = record("add-rmsnorm", flashinfer_dependent=1.0, flashinfer=2.0, graphfuse=2.0, graphfuse_dependent=1.5)
    case = r.record["cases"][0]
    assert r.best_peer(case) != "flashinfer_dependent" == r.best_peer(case, "graphfuse_dependent")
    verdicts = {t.text: t.verdict(r) for t in BENCHES["add-rmsnorm"].targets}
    assert verdicts["bf16 with dependent launch: time over the best peer's, at worst"].value == pytest.approx(1.5)
    r = record("qk-norm", quack_one_launch=0.1, flashinfer_dependent=0.2)
    case = r.record["cases"][0]
    assert r.best_peer(case, "graphfuse_one_kernel") == "quack_one_launch"
    assert r.best_peer(case, "graphfuse_dependent") == "flashinfer_dependent"
    assert r.best_peer(case) not in ("quack_one_launch", "flashinfer_dependent", "graphfuse_one_kernel")


@pytest.mark.parametrize("bench", NEW, ids=lambda b: b.name)
def test_a_record_of_it_makes_its_section(bench, tmp_path):
    content = bench_record.record(bench.name)
    text = f"<!-- bench:{bench.name}/section -->\n<!-- /bench -->\n<!-- bench:overview -->\n<!-- /bench -->\n"
    assert render.rendered(text, tmp_path).count(render.NONE) == 2
    record.write(tmp_path, bench.name, content["environment"], content)
    once = render.rendered(text, tmp_path)
    assert f"\n## {bench.title}\n" in once and "not measured" not in once
    assert all(peer.title in once for peer in bench.peers)
    for output in {case.output for case in bench.cases}:
        count = sum(case.output == output for case in bench.cases)
        assert f"| {bench.title} | {output} | {count} |" in once
    assert render.rendered(once, tmp_path) == once


# Sessions


def wall_clock(repeats: int = 3):
    """Times by the wall clock what runtime.timing times by CUDA graphs."""

    def sample(calls) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - start) / len(calls)

    def compare(captured) -> list[Time]:
        samples = [sorted(sample(calls) for _ in range(repeats)) for calls in captured]
        return [Time(s[len(s) // 2], s[0], s[-1]) for s in samples]

    return types.SimpleNamespace(
        buffer_sets=lambda moved: 2,
        capture=lambda calls: calls,
        dependent_launch=lambda captured: None,
        compare=compare,
    )


def broken(case, sets):
    raise RuntimeError("no kernel\nfor this")


PEERS = (
    graphfuse.PEER,
    Peer("missing", "Missing", broken, ("no-such-distribution",)),
    Peer("declining", "Declining", broken, why_not=lambda case, arch: f"not on SM{arch}"),
    Peer("broken", "Broken", broken),
    Peer("idle", "Idle", lambda case, sets: Work([lambda: None])),
    torch_eager.RMSNORM_SILU,
    stream.PEER,
)


def test_a_session_says_what_became_of_every_peer():
    case = Case(4, 64, "bf16")
    entry = session.measure(BENCH, case, PEERS, 90, "cpu", wall_clock())
    assert {k: v for k, v in entry.items() if k != "peers"} == {
        "rows": 4,
        "columns": 64,
        "output": "bf16",
        "bytes": case.moved,
    }
    peers = entry["peers"]
    assert list(peers) == [peer.name for peer in PEERS]
    assert peers["missing"] == {"absent": "no-such-distribution is not installed"}
    assert peers["declining"] == {"absent": "not on SM90"}
    assert peers["broken"] == {"error": "RuntimeError: no kernel"}
    assert peers["idle"]["error"].startswith("wrong result")
    for name in ("graphfuse", "torch_eager", "stream"):
        us = peers[name]["us"]
        assert 0 < us["low"] <= us["median"] <= us["high"]
        assert peers[name]["GB/s"] == pytest.approx(case.moved / us["median"] / 1e3, abs=0.1)
        assert peers[name]["of_stream"] == pytest.approx(peers["stream"]["us"]["median"] / us["median"], abs=1e-4)
    assert peers["graphfuse"]["note"]
    json.dumps(entry)


def test_in_a_session_whoever_is_not_installed_is_named():
    for name, case in (("add-rmsnorm", AddCase(3, 64, "bf16")), ("add-rmsnorm-fp8", AddCase(3, 64, "fp8_e4m3"))):
        bench = BENCHES[name]
        peers = [p for p in bench.peers if p.name not in ("graphfuse_dependent", "torch_compile")]
        entries = session.measure(bench, case, peers, 90, "cpu", wall_clock())["peers"]
        assert list(entries) == [p.name for p in peers]
        for peer in peers:
            missing = [d for d, version in peer.versions().items() if version is None]
            said = f"{', '.join(missing)} is not installed"
            assert entries[peer.name] == {"absent": said} if missing else entries[peer.name]["us"]["low"] > 0


def test_flashinfer_says_what_it_cannot():
    assert "SM100" in flashinfer.RMSNORM_SILU.why_not(SMALL[2], 90)
    assert flashinfer.RMSNORM_SILU.why_not(SMALL[2], 100) is None


def test_every_case_has_somebody_to_compare_with():
    assert [p.name for p in BENCH.peers][0] == BENCH.ours and BENCH.peers[-1].name == BENCH.stream
    assert len({p.name for p in BENCH.peers}) == len(BENCH.peers)


# Figures


@pytest.fixture
def results() -> Results:
    return Results(bench_record.record())


def change(results: Results, label: str, peer: str, us: float | None) -> None:
    (case,) = (c for c in results.record["cases"] if f"{c['output']} {c['rows']}x{c['columns']}" == label)
    case["peers"][peer] = {"error": "gone"} if us is None else {"us": {"median": us, "low": us, "high": us}}


def figures(results: Results) -> dict[str, target.Verdict]:
    return {t.text: t.verdict(results) for t in BENCH.targets}


def test_targets(results):
    before = list(figures(results).values())
    assert len(before) == len(BENCH.targets) == 13 and all(v.value for v in before)
    ours = next(c for c in results.cases("bf16") if (c["rows"], c["columns"]) == (24960, 512))["peers"]["graphfuse"]
    change(results, "bf16 24960x512", "torch_compile", ours["us"]["median"] / 1.5)
    after = figures(results)
    slowest = after["bf16 and fp8_e4m3: time over the best peer's, at worst"]
    assert (slowest.met, slowest.where) == (False, "bf16 24960x512")
    assert slowest.value == pytest.approx(1.5)
    # 51 MB moved: the 32 to 128 MB class.
    change(results, "bf16 24960x512", "graphfuse", 2 * ours["us"]["median"])
    (least,) = (v for t, v in figures(results).items() if t.startswith("bf16, 32 to 128 MB"))
    assert (least.met, least.where) == (False, "bf16 24960x512")
    # FP4 is compared with FP8 at its own size.
    change(results, "fp8_e4m3 1560x64", "graphfuse", 1.0)
    change(results, "nvfp4 1560x64", "graphfuse", 1.2)
    (fp4,) = (v for t, v in figures(results).items() if t.startswith("nvfp4: time over fp8"))
    assert (fp4.met, fp4.where) == (False, "nvfp4 1560x64") and fp4.value == pytest.approx(1.2)


def test_a_mean_is_geometric(results):
    for case in results.cases("bf16", "fp8_e4m3"):
        label = f"{case['output']} {case['rows']}x{case['columns']}"
        change(results, label, "graphfuse", 1.0)
        change(results, label, "torch_compile", 4.0 if case["output"] == "bf16" else 1.0)
    (speedup,) = (v for t, v in figures(results).items() if "speed-up over torch.compile" in t)
    assert speedup.value == pytest.approx(2.0) and speedup.met


def test_what_was_not_measured_is_no_figure(results):
    results.record["cases"] = [c for c in results.record["cases"] if c["output"] == "bf16" and c["bytes"] < 2 * MB]
    verdicts = figures(results)
    assert verdicts["nvfp4: time over fp8_e4m3 output's at the same size, at worst"].met is None
    assert verdicts["below 2 MB: time over an elementwise kernel's on the same bytes, at worst"].met
    for case in results.record["cases"]:
        case["peers"]["graphfuse"] = case["peers"]["graphfuse_dependent"] = {"error": "gone"}
    assert all(v.met is None for v in figures(results).values())


def test_nobody_is_left_out_silently(results):
    change(results, "bf16 1560x64", "flashinfer", None)
    for case in results.record["cases"]:
        case["peers"]["cudnn_a"] = {"absent": "nvidia-cudnn-frontend is not installed"}
    texts = tables.absences(results)
    assert "cuDNN, mode A: nvidia-cudnn-frontend is not installed (120 of 120 cases)" in texts
    assert "FlashInfer: failed: gone (1 of 120 cases)" in texts
    row = next(row for row in tables.speedups(results).rows if row[0] == "cuDNN, mode A")
    assert set(row[1:]) == {"absent"}
    for case in results.cases("fp8_e4m3"):
        case["peers"]["cudnn_a"] = {"error": "no plan"}
    row = next(row for row in tables.speedups(results).rows if row[0] == "cuDNN, mode A")
    assert row[1:3] == ("absent", "failed")
    assert "flashinfer failed" in tables.line(results, results.record["cases"][0])


# Records


def test_a_record_is_whole_and_compact(tmp_path):
    content = bench_record.record()
    file = record.write(tmp_path, "rmsnorm-silu", content["environment"], content)
    assert json.loads(file.read_text()) == content
    assert [p.name for p in tmp_path.iterdir()] == ["rmsnorm-silu-nvidia-h200.json"]
    assert len(file.read_text().splitlines()) < 20 * 120


def test_a_run_goes_on_only_where_it_would_be_the_same(tmp_path):
    content = bench_record.record()
    about = content.pop("environment")
    kept = functools.partial(command.kept, tmp_path, BENCH)
    assert kept(about, BENCH.peers) == []
    file = record.write(tmp_path, BENCH.name, about, content)
    assert kept(about | {"date": "2030-01-01"}, BENCH.peers) == content["cases"]
    assert kept(about | {"device": "NVIDIA H100"}, BENCH.peers) == []  # whose file is another
    before = file.read_text()
    for other, peers, said in (
        ({"commit": "another"}, BENCH.peers, "its commit is 0123456789abcdef, here it is another; accepted"),
        ({"driver": "9"}, BENCH.peers, "its driver is 1.2, here it is 9"),
        ({}, BENCH.peers[:3], "here they are graphfuse, graphfuse_dependent, cudnn_oss;"),
    ):
        with pytest.raises(command.ResumeError, match=f"{file.name} is not gone on with: .*{said}"):
            kept(about | other, peers)
    assert file.read_text() == before
    dirty = about | {"commit": "0123-dirty"}
    record.write(tmp_path, BENCH.name, dirty, content)
    with pytest.raises(command.ResumeError, match="sources of 0123-dirty may have changed"):
        kept(dirty, BENCH.peers)


def test_a_part_is_no_whole(tmp_path):
    whole = bench_record.record()
    about, cases = whole.pop("environment"), whole["cases"]
    old = record.write(tmp_path, BENCH.name, about | {"commit": "old"}, whole)
    before = old.read_text()
    few = command.keep(tmp_path, BENCH, about, whole | {"cases": cases[:3]})
    assert few.name == "rmsnorm-silu-part-nvidia-h200.json" and old.read_text() == before
    # A run that was stopped goes on from the part, not from the whole one of another commit.
    assert command.kept(tmp_path, BENCH, about, BENCH.peers) == cases[:3]
    some = {name: whole["peers"][name] for name in ("graphfuse", "stream")}
    assert command.keep(tmp_path, BENCH, about, whole | {"peers": some}) == few and old.read_text() == before
    assert command.keep(tmp_path, BENCH, about, whole) == old
    assert json.loads(old.read_text()) == {"environment": about, **whole} and not few.exists()


def test_what_the_user_tuned_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path))
    with settings.nothing_tuned():
        assert not [*settings.tuning_dir().iterdir()]
        child = "from graphfuse import settings; print(settings.tuning_dir())"
        said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
        assert Path(said.strip()) == settings.tuning_dir() != tmp_path
    assert settings.tuning_dir() == tmp_path


# Docs


def test_docs_are_as_their_records():
    for name in render.FILES:
        text = (ROOT / name).read_text()
        assert "<!-- bench:" in text
        assert render.rendered(text, ROOT / "docs" / "records") == text, f"{name}: run make bench-docs"


@pytest.mark.parametrize("kind", BENCHES)
def test_plots_are_of_their_records(kind):
    results = Results.read(ROOT / "docs" / "records" / f"{kind}-{render.DEVICE}.json")
    for output in results.outputs if results else ():
        assert f"record {plot.digest(results)}" in (ROOT / "docs" / plot.name(kind, output)).read_text()


def test_marked_places_follow_the_record(tmp_path):
    text = "before\n<!-- bench:rmsnorm-silu/sizes -->\n<!-- /bench -->\nafter\n"
    empty = render.rendered(text, tmp_path)
    assert render.NONE in empty and empty.startswith("before\n") and empty.endswith("after\n")
    content = bench_record.record()
    record.write(tmp_path, "rmsnorm-silu", content["environment"], content)
    once = render.rendered(empty, tmp_path)
    assert "| bytes moved | bf16 | fp8_e4m3 | nvfp4 |" in once and render.NONE not in once
    assert render.rendered(once, tmp_path) == once
    other = copy.deepcopy(content)
    other["cases"][0]["peers"]["graphfuse"]["us"]["median"] *= 2
    record.write(tmp_path, "rmsnorm-silu", content["environment"], other)
    assert render.rendered(once, tmp_path) != once


@pytest.mark.parametrize("name", render.FILES)
def test_the_docs_own_places_render(name, tmp_path):
    for bench in BENCHES:
        content = bench_record.record(bench)
        record.write(tmp_path, bench, content["environment"], content)
    rows = [
        {"name": "execute", "us": {"median": 7.5, "low": 7.0, "high": 9.0}, "ratio": 1.25},
        {"name": "Quack", "absent": "quack-kernels is not installed"},
    ]
    record.write(tmp_path, "host-cost", content["environment"], {"rows": rows})
    record.write(tmp_path, "rmsnorm-silu-profile", content["environment"], bench_record.profile())
    text = render.rendered((ROOT / name).read_text(), tmp_path)
    assert render.NONE not in text and "commit 0123456789ab" in text
    assert all(bench.title in text for bench in NEW)  # in the overview, or in a section
    if name == "docs/performance.md":
        for bench in BENCHES.values():
            plots = [plot.name(bench.name, output) for output in {case.output for case in bench.cases}]
            assert all(said in text for said in (*plots, *(t.text for t in bench.targets))), bench.name
    if "bench:rmsnorm-silu-profile" in text:
        assert "| nvfp4 399360x1024 | 300.2 | 1.75 | 52 % | 58 | 3.38 | 20.75 | 57 / 42 / 68 / - % |" in text
        assert "| bf16 399360x1024 | - |" in text and "not selected 30 %, long scoreboard 25 %, wait 20 % |" in text
        assert "- cuDNN, mode A: in 80 of 80 cases" in text and "- FlashInfer: in none of 80 cases" in text
    if "bench:host-cost" in text:
        assert "| execute | 7.50 | 7.00 to 9.00 | 1.25 |" in text
        assert "| Quack | absent: quack-kernels is not installed | - | - |" in text


@pytest.mark.parametrize("name", [BENCH.name, "rmsnorm-backward"])
def test_the_same_record_gives_the_same_plots(name, tmp_path):
    pytest.importorskip("matplotlib")
    results = Results(bench_record.record(name))
    (tmp_path / "again").mkdir()
    files = plot.write(results, name, tmp_path)
    assert [f.name for f in files] == [f"{name}-{o}.svg" for o in results.outputs]
    for file, again in zip(files, plot.write(results, name, tmp_path / "again"), strict=True):
        text = file.read_text()
        assert text == again.read_text() and plot.digest(results) in text
    # Every peer that has times is named.
    assert all(results.title(peer) in files[0].read_text() for peer in results.record["peers"])
    assert "FlashInfer" not in files[-1].read_text() or name != BENCH.name  # which has no NVFP4 here


def test_points_of_equal_bytes_are_one(results):
    points = plot.points(results, "bf16", "graphfuse")
    assert len({round(mb, 1) for mb, _ in points}) == len(points) < 40
    assert [mb for mb, _ in points] == sorted(mb for mb, _ in points)


# The command line


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, ["bench", *arguments])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["no-such-bench"], "rmsnorm-silu"),
        (["--peers", "nobody"], "flashinfer"),
        (["--output", "fp64"], "nvfp4"),
        (["--rows", "7"], "399360"),
        (["--quick", "--columns", "128"], "fewer filters"),
        (["--quick", "--resume"], "give --record"),
        (["--quick", "--record", __file__], "--record"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.output


def test_listing_needs_no_gpu():
    done = invoke("--list", "--quick", "--output", "nvfp4", "--peers", "flashinfer")
    assert done.exit_code == 0
    assert done.output.count("  case nvfp4 ") == 4 and done.output.count("  peer ") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-c", "from graphfuse.cli import app; app()", "bench", "--quick"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("needs a CUDA device: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["build_time", "heuristics", "host_cost", "profile"])
def test_without_a_gpu_the_other_benches_say_so(name):
    done = subprocess.run([sys.executable, "-m", f"graphfuse.benchmarks.{name}"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{name} needs a GPU: ")


def test_the_command_line_is_light():
    code = "import sys, graphfuse.cli; print({'torch', 'numpy', 'graphfuse.benchmarks'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_run_says_how_it_goes_and_what_came_out(capsys):
    from rich.console import Console

    console = Console(width=command.WIDTH)
    peers = (graphfuse.PEER, torch_eager.RMSNORM_SILU, stream.PEER)
    with command._progress(console) as progress:
        entries = list(command._measure(BENCH, SMALL, peers, 90, "cpu", wall_clock(), progress))
    command._report(BENCH, Results(bench_record.record() | {"cases": entries}), console)
    out = capsys.readouterr().out
    assert "[3/3, 0.0 min left] nvfp4 33x64: " in out and "of stream" in out
    assert "dependent launch, graphfuse: not recorded" in out
    assert "targets" in out and "torch eager: torch converts nothing to FP4 (1 of 3 cases)" in out


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_the_problems_of_every_bench_can_be_tuned(bench):
    case = min(bench.quick, key=lambda case: case.moved)
    g = case.graph(create_handle("cpu"))
    g.validate()
    named = {t.name for t in g._ir.bound if not t.by_value}
    assert set(case.tensors("cpu")) == named
