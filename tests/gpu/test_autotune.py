"""Tuning on a GPU: the winner is selected, kept, found by other processes; wrong kernels never win."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from graphfuse import WorkspaceError, heur_mode
from graphfuse.benchmarks import record, sizes
from graphfuse.cli import app
from graphfuse.engines.rows import RowEngine
from graphfuse.runtime import device as devices
from graphfuse.tuned_tables import store
from support import graphs, planted
from support.graphs import E4M3, FP4, Norm

# A candidate that is dropped is a RuntimeWarning: none may be, but where a test plants one.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::RuntimeWarning")]

ROOT = Path(__file__).resolve().parents[2]
CASE = Norm(999, 320)


@pytest.fixture(autouse=True)
def own_store(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path))


def planned(case: Norm, engines=()):
    g = case.graph("cuda")
    g.validate()
    g.build_operation_graph(engines=engines)
    g.create_execution_plans([heur_mode.A])
    return g


@pytest.mark.parametrize(
    "case",
    [CASE, Norm(999, 320, output=E4M3), Norm(100, 1024, output=FP4, blocks=True), Norm(64, 64, output=FP4)],
    ids=["bf16", "fp8", "nvfp4", "nvfp4 implicit"],
)
def test_the_winner_is_used_kept_and_right(case):
    g, pack, outputs = planned(case), case.inputs("cuda"), case.outputs("cuda")
    before = {name: value.clone() for name, value in pack.items()}
    workspace = graphs.workspace(1 << 16, "cuda")
    report = g.autotune(pack | outputs, workspace, time_budget=60)
    torch.cuda.synchronize()
    assert all(torch.equal(before[name], pack[name]) for name in pack)
    if case.output is not FP4 or case.blocks:
        graphs.hold(case, pack, outputs)
    (part,) = report.parts
    assert part.trials[0].status == "best" and part.trials[0].knobs == part.best
    assert all(t.time and t.time.low <= t.time.median <= t.time.high for t in part.trials)
    assert len(part.trials) >= 5 and 1 <= sum(t.rounds == 3 for t in part.trials) <= 3
    # Selected here, and first where the problem is planned again.
    device = devices.get("cuda")
    said = f"tuned on this {device.name}"
    assert said in g.explain() and report.stored == store.user_file(device)
    again = planned(case)
    assert again.get_engine_and_knobs_at_index(0) == ("rows", part.best)
    again.build_plans()
    assert said in again.explain()
    (kept,) = store.read(report.stored)
    assert (kept.rows, kept.us, kept.source.driver) == (case.rows, round(part.trials[0].time.median, 3), driver())
    assert len(kept.others) == len(part.trials) - 1


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def test_in_place():
    g, pack = planned(CASE), CASE.inputs("cuda")
    outputs = CASE.outputs("cuda")
    planned_once = graphs.fused(CASE)
    planned_once.execute(pack | outputs)
    g.autotune(pack | {"out": pack["x"]}, time_budget=60)
    assert torch.equal(pack["x"], outputs["out"])


def test_two_regions_of_one_class_are_tuned_once():
    g = graphs.new(device="cuda")
    for number in range(2):
        x = g.tensor([512, 256], data_type=graphs.BF16, name=f"x{number}")
        w = g.tensor([1, 256], data_type=graphs.BF16, name=f"w{number}")
        y = g.rmsnorm(x, w, 1e-5, norm_forward_phase=graphs.norm_forward_phase.INFERENCE)[0]
        g.swish(y).set_output().set_name(f"out{number}").set_data_type(graphs.BF16)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    pack = {name: torch.randn(1, 256, device="cuda", dtype=torch.bfloat16) for name in ("w0", "w1")}
    pack |= {name: torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) for name in ("x0", "x1")}
    outs = {name: torch.empty(512, 256, device="cuda", dtype=torch.bfloat16) for name in ("out0", "out1")}
    report = g.autotune(pack | outs, time_budget=600)
    tuned = {name: t.clone() for name, t in outs.items()}
    assert len(report.parts) == 1 and report.parts[0].trials[0].status == "best"
    g.build([heur_mode.A])
    assert g.get_engine_and_knobs_at_index(0)[1] == (report.parts[0].best,) * 2
    g.execute(pack | outs)
    assert all(torch.equal(tuned[name], outs[name]) for name in outs)


class Planted(RowEngine):
    """Wrong wherever a CTA has 128 threads."""

    name = "planted"

    def source(self, facts, knobs):
        text = super().source(facts, knobs)
        return planted.wrong(text) if knobs.threads == 128 else text

    def propose(self, facts, device, mode):
        first = super().propose(facts, device, heur_mode.A)[0]
        return [dataclasses.replace(first, threads=t) for t in (128, 256, 512)]


def test_a_wrong_kernel_is_named_and_dropped():
    g, pack, outputs = planned(CASE, [Planted()]), CASE.inputs("cuda"), CASE.outputs("cuda")
    with pytest.warns(RuntimeWarning, match="'planted' with knobs .*'threads': 128.* wrong: tensor 'out'"):
        report = g.autotune(pack | outputs, time_budget=60)
    assert sorted(t.status for t in report.parts[0].trials) == ["best", "timed", "wrong"]
    graphs.hold(CASE, pack, outputs)


def test_no_time_keeps_nothing_and_still_executes():
    g, pack, outputs = planned(CASE), CASE.inputs("cuda"), CASE.outputs("cuda")
    report = g.autotune(pack | outputs, time_budget=1e-6)
    assert {t.status for t in report.parts[0].trials} == {"not tried"} and report.stored is None
    graphs.hold(CASE, pack, outputs)
    assert not store.user_file(devices.get("cuda")).exists()


def test_the_workspace_is_asked_for_first():
    case = Norm(64, 64, output=FP4)
    with pytest.raises(WorkspaceError):
        planned(case).autotune(case.inputs("cuda") | case.outputs("cuda"))


def test_the_command_tunes_skips_and_goes_on(tmp_path):
    arguments = ["tune", "--rows", "1560", "--columns", "64", "--columns", "128", "--output", "bf16"]
    table = tmp_path / "rmsnorm.json"
    done = CliRunner().invoke(app, [*arguments, "--table", str(table), "--time-budget", "400"])
    assert done.exit_code == 0 and "2 of 2 sizes are tuned" in done.output, done.output
    first = store.parse(table.read_bytes())
    assert {e.source.origin for e in first} == {"measured"} and not any(e.others for e in first)
    assert {e.source.commit for e in first} == {record.environment(record.CHECKOUT)["commit"]}
    CliRunner().invoke(app, [*arguments, "--table", str(table), "--time-budget", "400"])
    assert store.parse(table.read_bytes()) == first
    # Out of time: what is left is said, and nothing is lost.
    short = CliRunner().invoke(app, [*arguments, "--again", "--table", str(table), "--time-budget", "0.5"])
    assert short.exit_code == 0 and "2 of 2 problems are left" in short.output
    assert store.parse(table.read_bytes()) == first
    mine = CliRunner().invoke(app, [*arguments, "--time-budget", "400"])
    assert mine.exit_code == 0 and len(store.read(store.user_file(devices.get("cuda")))) == 2
    best = sizes.Size(1560, 64, "bf16").planner().plans[0].parts[0]
    assert best.why.startswith("tuned on this")


def test_the_heuristics_benchmark_measures_what_it_says(tmp_path):
    command = [sys.executable, "-m", "graphfuse.benchmarks.programs.heuristics", "--sizes", "3", "--record", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 sizes: median" in done.stdout and len([*tmp_path.glob("heuristics-*.json")]) == 1
