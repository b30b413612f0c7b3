"""`graphfuse explain` and `graphfuse compile`: what is planned and compiled for chips that are not there."""

import pytest

from graphfuse import heur_mode
from graphfuse.benchmarks.rmsnorm_silu import BENCH
from graphfuse.cli import compile
from graphfuse.device import for_arch
from graphfuse.runtime import cache

CASE = "bf16 1560x64"

MINE = """
import graphfuse
def graph():
    g = graphfuse.pygraph(io_data_type=graphfuse.data_type.HALF, intermediate_data_type=graphfuse.data_type.FLOAT)
    x = g.tensor([8, 64])
    g.swish(x).set_output()
    return g
"""


@pytest.fixture(autouse=True)
def forgotten():
    """What other tests compiled, into caches of theirs."""
    cache._kernels.clear()


@pytest.fixture
def mine(tmp_path):
    """A graph that no kernel computes."""
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py:graph"


def test_a_chip_that_is_not_there_is_planned_for(run, answer):
    (found,) = answer("explain", "rmsnorm-silu", "--case", CASE, "--arch", "sm_100a")
    assert "B200" in found["device_name"]
    (region,) = found["regions"]
    assert region["engine"] == "rows" and region["nodes"] == [*range(len(found["nodes"]))] and region["fused"]
    text = run("explain", "rmsnorm-silu", "--case", CASE, "--arch", "sm_100a").output
    assert found["plans"][0]["name"] in text and "B200" in text


def test_without_a_case_the_first_is_explained(answer):
    (found,) = answer("explain", "rmsnorm-silu", "--arch", "sm_90a")
    assert found["subject"] == f"rmsnorm-silu {BENCH.cases[0]}"


def test_a_graph_without_a_plan_is_a_fault_with_reasons(answer, mine):
    (found,) = answer("explain", mine, "--mode", "OPENSOURCE", "--arch", "sm_90a", code=1)
    assert found["plans"] == []
    (found,) = answer("explain", mine, "--mode", "A", "--arch", "sm_90a")
    assert [plan["name"] for plan in found["plans"]] == ["reference"]


@pytest.mark.compile
def test_kernels_compiled_ahead_are_those_that_planning_looks_for(answer, monkeypatch):
    """With memory forgotten, as in another process."""
    from graphfuse import planner
    from graphfuse.runtime import launch

    report = answer("compile", "rmsnorm-silu", "--case", CASE, "--arch", "sm_90a")
    assert (report["graphs"], report["kernels"], report["compiled"], report["failed"]) == (1, 1, 1, [])
    assert report["bytes"] > 1000 and report["arch"] == "sm_90a"
    cache._kernels.clear()
    before, loaded = cache.statistics(), []
    monkeypatch.setattr(launch, "load", lambda code, entry, device: loaded.append(code))
    (case,) = (c for c in BENCH.cases if str(c) == CASE)
    device = for_arch("sm_90a")
    (part,) = compile.plans(case.graph(), device, heur_mode.OPENSOURCE)[0].parts
    planner.prepare(part, device)
    after = cache.statistics()
    assert (after.compiled - before.compiled, after.disk_hits - before.disk_hits) == (0, 1)
    assert [len(code) for code in loaded] == [report["bytes"]]


@pytest.mark.compile
def test_what_is_there_is_not_compiled_again(run, answer):
    arguments = ("compile", "rmsnorm-silu", "--case", CASE, "--case", "bf16 6240x64", "--arch", "sm_90a")
    first = run(*arguments)
    assert first.exit_code == 0 and "compiled in" in first.output
    cache._kernels.clear()
    again = answer(*arguments)
    assert again["compiled"] == 0 and again["kept_before"] == again["kernels"] > 0


def test_a_file_holds_one_graph(run, tmp_path):
    """What it is good for is in tests/core/test_serialized.py."""
    file = tmp_path / "all.plan"
    done = run("compile", "rmsnorm-silu", "--arch", "sm_90a", "--output", str(file))
    assert done.exit_code == 2 and "--case" in done.output and not file.exists()


@pytest.mark.compile
def test_a_file_that_cannot_be_written(run, tmp_path):
    missing = tmp_path / "none" / "norm.plan"
    done = run("compile", "rmsnorm-silu", "--case", CASE, "--arch", "sm_90a", "--output", str(missing))
    assert done.exit_code == 2 and "No such file" in done.output


def test_no_file_of_a_graph_without_a_kernel(answer, mine, tmp_path):
    file = tmp_path / "mine.plan"
    report = answer("compile", mine, "--arch", "sm_90a", "--output", str(file), code=1)
    assert report["output"] is None and not file.exists()


def test_a_graph_without_a_kernel_fails_and_the_reason_is_told(answer, mine):
    report = answer("compile", mine, "--arch", "sm_90a", code=1)
    assert report["kernels"] == 0
    (failed,) = report["failed"]
    assert failed["subject"] == mine and "no engine generates a kernel" in failed["why"] and "swish" in failed["why"]
