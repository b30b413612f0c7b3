"""The figures of a record: targets, means, who is compared with whom."""

import pytest

from graphfuse.benchmarks import tables, target
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.results import MB, Results
from graphfuse.benchmarks.rmsnorm_silu import BENCH
from support import bench_record


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


@pytest.mark.parametrize("bench", BENCHES)
def test_a_run_of_few_peers_has_verdicts(bench):
    few = Results(bench_record.record(bench))
    asked = {few.ours, few.stream}
    few.record["peers"] = {name: about for name, about in few.record["peers"].items() if name in asked}
    for case in few.cases():
        case["peers"] = {name: entry for name, entry in case["peers"].items() if name in asked}
    verdicts = tables.targets(BENCHES[bench], few)
    assert len(verdicts.rows) == len(BENCHES[bench].targets)
    assert not tables.speedups(few).rows


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
