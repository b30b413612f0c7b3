"""make gpu-check as far as it goes without a GPU: finding the tools, reading them, judging, records."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import gpu_check
from graphfuse.benchmarks import record
from graphfuse.runtime import nvrtc
from support import sanitizer, variants

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
WRITE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at rmsnorm+0x1f0 in store.cuh:12
=========     by thread (63,0,0) in block (0,0,0)
=========
========= Invalid __global__ write of size 4 bytes
=========     at rmsnorm+0x1f0 in store.cuh:12
=========     by thread (62,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at racecheck+0x90 in planted.cu:7
=========     and Read access at racecheck+0xd0 in planted.cu:8 [256 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
REFUSED = """========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section
=========
========= Target application returned an error
"""


def test_logs():
    report = sanitizer.parse(WRITE, finished=False)
    assert report.errors == 2
    assert report.findings == ("Invalid __global__ write of size 4 bytes at rmsnorm+0x1f0 in store.cuh:12",)
    assert sanitizer.parse(CLEAN, True).errors == sanitizer.parse(NO_RACE, True).errors == 0
    assert sanitizer.parse(CLEAN, True).findings == sanitizer.parse(NO_RACE, True).findings == ()
    assert sanitizer.parse(RACE, True).errors == 1
    assert "planted.cu:7 and Read access" in sanitizer.parse(RACE, True).findings[0]
    assert sanitizer.parse(REFUSED, False, errors="no device\n").last_words.endswith("returned an error / no device")
    assert sanitizer.parse("", False).errors is None


JUDGED = {
    "clean": (WRITE, (CLEAN, True)),
    "found": (WRITE, (WRITE, True)),
    "failed": (WRITE, (CLEAN, False)),
    "blind": (CLEAN, (CLEAN, True)),
    "did not run": (REFUSED, (REFUSED, False)),
}


@pytest.mark.parametrize("status", JUDGED)
def test_judgement(status):
    planted, (log, finished) = JUDGED[status]
    result = gpu_check.judge("memcheck", sanitizer.parse(planted, False), sanitizer.parse(log, finished, "2 variants"))
    assert result["status"] == status
    content = {"tests": None, "kernels": "2 variants", "tools": {"memcheck": result}}
    assert gpu_check.is_bad(content) == (status in ("found", "failed", "blind"))
    assert gpu_check.outcome(content) == f"tests: not run; memcheck {status}"
    assert json.loads(json.dumps(result)) == result


def test_failed_tests_and_kernels_are_bad():
    good = {"tests": {"exit_status": 0, "counts": {"passed": 5, "failed": 0}}, "kernels": "2 variants", "tools": {}}
    assert not gpu_check.is_bad(good) and gpu_check.outcome(good).startswith("tests: 5 passed;")
    assert gpu_check.is_bad(good | {"tests": {"exit_status": 1}}) and gpu_check.is_bad(good | {"kernels": "failed"})


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in for compute-sanitizer: runs the program and leaves a clean log."""
    path = tmp_path / "toolkit" / "bin" / "compute-sanitizer"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        "log, rest = sys.argv.index('--log-file'), sys.argv[1:]\n"
        f"open(sys.argv[log + 1], 'w').write({CLEAN!r})\n"
        "sys.exit(subprocess.run(sys.argv[log + 2:]).returncode)\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    return path


def test_the_toolkit_that_the_user_names_comes_first(tool):
    assert sanitizer.find()[0] == tool


def test_places_are_named_where_it_is_nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitizer, "find", lambda: (None, ("here", "PATH")))
    tools = gpu_check.run_tools(["memcheck"], [], 1)["tools"]
    assert tools["memcheck"]["status"] == "did not run" and "not in here, PATH; pip install" in tools["memcheck"]["why"]


def test_running_a_tool(tool):
    report = sanitizer.run(tool, "memcheck", [sys.executable, "-c", "print('3 variants')"], 60)
    assert (report.errors, report.finished, report.output.strip()) == (0, True, "3 variants")
    assert not sanitizer.run(tool, "racecheck", [sys.executable, "-c", "raise SystemExit(3)"], 60).finished
    late = sanitizer.run(tool, "initcheck", [sys.executable, "-c", "import time; time.sleep(20)"], 0.5)
    assert not late.finished and "not finished after" in late.last_words


def test_a_tool_that_passes_the_planted_bug_is_not_believed(tool):
    ran = gpu_check.run_tools(["memcheck", "synccheck"], [sys.executable, "-c", "print('2 variants')"], 60)
    assert [result["status"] for result in ran["tools"].values()] == ["blind", "blind"]


def test_without_a_gpu_it_says_so(capsys, tmp_path):
    if record.no_gpu() is None:
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--record", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert not out and re.fullmatch("make gpu-check needs a GPU: .+\n", error)
    assert not list(tmp_path.iterdir())


def test_arguments(capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--tools", "leakcheck"])
    assert caught.value.code == 2 and "invalid choice: 'leakcheck'" in capsys.readouterr().err


ABOUT = {"device": "NVIDIA H200", "date": "2026-01-02", "commit": "0123456789abcdef-dirty"}


def test_standing(tmp_path):
    (line,) = gpu_check.standing(tmp_path, "new")
    assert line == "there is no record of make gpu-check: run it on a machine with a GPU"
    content = {"sources": "old", "tests": None, "kernels": "2 variants", "tools": {"memcheck": {"status": "clean"}}}
    path = record.write(tmp_path, gpu_check.KIND, ABOUT, content)
    assert path == tmp_path / "gpu-check-nvidia-h200.json"
    (line,) = gpu_check.standing(tmp_path, "new")
    assert line == (
        "gpu-check-nvidia-h200.json (2026-01-02, commit 0123456789ab) is older than the kernel sources: "
        "run make gpu-check on a NVIDIA H200"
    )
    (line,) = gpu_check.standing(tmp_path, "old")
    assert line.endswith("is of these kernel sources: tests: not run; memcheck clean")


@pytest.mark.further
@pytest.mark.xdist_group("digest")
def test_standing_of_these_sources(note):
    """Never fails for an old record; its text is printed at the end of the run."""
    lines = gpu_check.standing(gpu_check.RECORDS, variants.digest())
    assert lines
    for line in lines:
        note(line)


def test_a_run_prints_each_note_once_and_its_record_names_what_failed(pytester_run, tmp_path):
    code = "import pytest\n@pytest.fixture\ndef broken(): 1 / 0\n"
    code += "def test_a(note): note('hello')\ndef test_b(note):\n note('hello')\n assert 0\ndef test_c(broken): pass\n"
    out = pytester_run(code, "--record", str(tmp_path / "made"))
    assert out.count("note: hello") == 1
    (file,) = (tmp_path / "made").iterdir()
    left = json.loads(file.read_text())
    assert f"record: {file}" in out and file.name.startswith("gpu-tests-") and left["exit_status"] == 1
    assert left["counts"] == {"passed": 1, "failed": 1, "error": 1, "skipped": 0}
    assert left["failed"] == ["test_it.py::test_b", "test_it.py::test_c"]


def test_a_lane_of_several_gpus_has_a_record_of_its_own():
    assert [record.of_tests({"devices": n}) for n in (0, 1, 2)] == ["gpu-tests", "gpu-tests", "gpu-tests-of-2"]


@pytest.fixture
def pytester_run(tmp_path):
    """Run test code in a pytest of its own with this folder's conftest, in a worker."""
    import subprocess

    def run(code: str, *options: str) -> str:
        (tmp_path / "test_it.py").write_text(code)
        root = Path(__file__).resolve().parents[1]
        (tmp_path / "conftest.py").write_text((root / "conftest.py").read_text())
        command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", str(tmp_path), *options]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    return run


@pytest.mark.compile
@pytest.mark.parametrize("arch", variants.TARGETS)
def test_planted_bugs_compile(arch):
    source = (Path(__file__).parents[1] / "planted.cu").read_text()
    assert set(re.findall(r"__global__ void (\w+)", source)) == set(sanitizer.TOOLS)
    assert nvrtc.compile(source, arch, "planted.cu")
