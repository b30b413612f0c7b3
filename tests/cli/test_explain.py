"""`graphfuse explain` and `graphfuse compile`: what is planned and compiled for chips that are not there."""

import re
import sys
from dataclasses import replace

import pytest

from graphfuse import heur_mode
from graphfuse.base.device import for_arch
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.rmsnorm_silu import BENCH
from graphfuse.cli.subject import planner
from graphfuse.runtime import cache

CASE = "bf16 1560x64"

MINE = """
import graphfuse
def graph():
    g = graphfuse.pygraph(io_data_type=graphfuse.data_type.HALF, intermediate_data_type=graphfuse.data_type.FLOAT)
    x = g.tensor([8, 64])
    g.transpose(x, [1, 0]).set_output()
    return g
"""

BESIDE = """
import graphfuse
from sizes_beside import SIZES
def make():
    from types_beside import TYPE
    g = graphfuse.pygraph(io_data_type=TYPE)
    g.relu(g.tensor(SIZES)).set_output()
    return g
"""


@pytest.fixture(autouse=True)
def forgotten():
    """What other tests compiled, into caches of theirs."""
    cache._kernels.clear()


@pytest.fixture
def unloaded():
    """No module that a test loads stays."""
    before = set(sys.modules)
    yield
    for name in ("sib", "folder", "folder.sib", "sizes_beside", "types_beside"):
        assert name not in before
        sys.modules.pop(name, None)


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.py", "accepted: {}/mine.py:FUNCTION"),
        ("mine.py:grph", "no function 'grph'; there are: graph, sized"),
        ("mine.py:sized", "needs rows, columns; accepted: a function without arguments"),
    ],
)
def test_a_function_that_is_not_named_right(run, mine, tmp_path, name, said):
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\ndef sized(rows, *, columns, more=1):\n    return graph()\n")
    done = run("explain", f"{tmp_path}/{name}")
    assert done.exit_code == 2 and squeezed(said.format(tmp_path)) in squeezed(done.output)


def squeezed(text: str) -> str:
    """Without the frame, and the line breaks, that errors are printed in."""
    return re.sub(r"[\s│]", "", text)


def test_of_many_cases_those_like_what_was_given_are_told(run):
    done = run("explain", "rmsnorm-silu", "--case", "bf16 1560x65")
    assert done.exit_code == 2 and "'bf16 1560x64'" in done.output and len(done.output) < 1000
    assert "graphfuse bench rmsnorm-silu --list" in re.sub(r"[\s│]+", " ", done.output)
    done = run("explain", "softmax", "--case", "bf16 1560x65")
    assert all(squeezed(str(case)) in squeezed(done.output) for case in BENCHES["softmax"].cases)


def test_a_page_that_cannot_be_written(run, mine, tmp_path):
    done = run("explain", mine, "--html", tmp_path / "none" / "page.html")
    assert done.exit_code == 2 and "No such file" in done.output


@pytest.mark.compile
def test_kernels_compiled_ahead_are_those_that_planning_looks_for(answer, monkeypatch):
    """With memory forgotten, as in another process."""
    from graphfuse.planning import kernels
    from graphfuse.runtime import launch

    report = answer("compile", "rmsnorm-silu", "--case", CASE, "--arch", "sm_90a")
    assert (report["graphs"], report["kernels"], report["compiled"], report["failed"]) == (1, 1, 1, [])
    assert report["bytes"] > 1000 and report["arch"] == "sm_90a"
    cache._kernels.clear()
    before, loaded = cache.statistics(), []
    monkeypatch.setattr(launch, "load", lambda code, entry, device: loaded.append(code))
    (case,) = (c for c in BENCH.cases if str(c) == CASE)
    device = for_arch("sm_90a")
    planning = planner(case.graph(), device)
    planning.create([heur_mode.OPENSOURCE])
    (part,) = planning.plans[0].parts
    kernels.prepare(part, replace(device, here=True))
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
    """What it is good for is in tests/planning/test_serialized_graph.py."""
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


@pytest.mark.parametrize("subject", ["sib.py:make", "folder/sib.py:make", "sib:make", "folder.sib:make"])
def test_a_file_that_imports_one_beside_it(answer, tmp_path, monkeypatch, unloaded, subject):
    """When it is loaded, and when its function is called. Afterwards nothing more is found than before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    beside = tmp_path / "folder" if subject.startswith("folder/") else tmp_path
    (tmp_path / "folder").mkdir()
    (beside / "sizes_beside.py").write_text("SIZES = [8, 64]\n")
    (beside / "types_beside.py").write_text("from graphfuse import data_type\nTYPE = data_type.HALF\n")
    file = tmp_path / (subject if ".py" in subject else subject.replace(".", "/").replace(":", ".py:")).split(":")[0]
    file.write_text(BESIDE)
    before = list(sys.path)
    (found,) = answer("explain", subject)
    assert found["subject"] == subject and len(found["nodes"]) == 1 and sys.path == before


def test_a_graph_without_a_kernel_fails_and_the_reason_is_told(answer, mine):
    report = answer("compile", mine, "--arch", "sm_90a", code=1)
    assert report["kernels"] == 0
    (failed,) = report["failed"]
    assert failed["subject"] == mine
    assert "no engine generates a kernel" in failed["why"] and "transpose" in failed["why"]
