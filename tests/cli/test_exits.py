"""What the command line answers as a whole: help, version, exit codes."""

import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

GRAPH = """
import graphfuse
def graph():
    return graphfuse.pygraph()
def empty_tensor():
    g = graphfuse.pygraph()
    g.relu(g.tensor([0, -1]))
    return g
def number():
    return 7
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "mine.py").write_text(GRAPH)
    return tmp_path / "mine.py"


def test_help_says_what_exit_codes_mean(run):
    done = run("--help")
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    for said in ("0 all is well", "1 a fault was found", "2 wrong arguments", "3 the command needs a device"):
        assert said in words


@pytest.mark.parametrize("group", [(), ("cache",)])
def test_without_a_command_there_is_help_and_the_code_of_usage(run, group):
    done = run(*group)
    assert done.exit_code == 2 and done.stdout.strip() == run(*group, "--help").stdout.strip()


def test_the_version_is_that_of_the_distribution(run):
    done = run("--version")
    assert done.exit_code == 0 and done.output.strip() == f"graphfuse {metadata.version('graphfuse')}"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "graphfuse", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == f"graphfuse {metadata.version('graphfuse')}"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("frobnicate",), "frobnicate"),
        (("explain", "no-such-bench"), "rmsnorm-silu"),
        (("explain", "rmsnorm-silu", "--case", "bf16 1x1"), "rmsnorm-silu has 'bf16"),
        (("explain", "rmsnorm-silu", "--mode", "C"), "OPENSOURCE"),
        (("explain", "rmsnorm-silu", "--arch", "sm_12"), "sm_90a"),
        (("explain", "no_such_module:graph"), "no_such_module"),
        (("explain", "no/such/file.py:graph"), "no/such/file.py"),
        (("compile", "rmsnorm-silu"), "--arch"),
        (("cache", "ls", "wheels"), "cubins"),
        (("explain", ":graph"), "MODULE:FUNCTION"),
        (("explain", "os:"), "MODULE:FUNCTION"),
        (("tune", "softmax", "--table", "/no/such/folder/table.json"), "--table"),
    ],
)
def test_wrong_arguments_are_2_and_told_with_what_is_accepted(run, arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.output.split())


@pytest.mark.parametrize("name, said", [("nobody", "nobody"), ("number", "returned 7")])
def test_what_returns_no_graph_is_2(run, module, name, said):
    done = run("explain", f"{module}:{name}")
    assert done.exit_code == 2 and said in done.output


def test_cases_are_of_benches(run, module):
    assert run("explain", f"{module}:graph", "--case", "bf16 1560x64").exit_code == 2


def test_a_wrong_setting_is_2(run, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "gpu")
    done = run("explain", "rmsnorm-silu")
    assert done.exit_code == 2 and "accepted: cpu, cuda, cuda:N, emulator" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_3(run, monkeypatch):
    assert run("bench", "--quick").exit_code == 3
    assert run("tune", "--quick").exit_code == 3
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "cuda:0")
    done = run("explain", "rmsnorm-silu")
    assert done.exit_code == 3 and done.output.startswith("DeviceError: ")


def test_a_graph_that_is_not_valid_is_1(run, module):
    done = run("explain", f"{module}:empty_tensor")
    assert done.exit_code == 1 and "GraphValidationError" in done.output or "GraphTypeError" in done.output


def test_what_the_users_own_code_raises_keeps_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("def graph():\n    return 1 / 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "graphfuse", "explain", "broken:graph"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    "text, raised",
    [
        ("def graph():\n    return 1 / 0\n", "ZeroDivisionError"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError"),
        ("def graph(:\n", "SyntaxError"),
    ],
)
def test_the_traceback_begins_in_the_users_file(run, tmp_path, text, raised):
    (tmp_path / "mine.py").write_text(text)
    done = run("explain", f"{tmp_path}/mine.py:graph")
    files = re.findall(r'File "([^"]*)"', done.output)
    assert done.exit_code == 1 and raised in done.output and files == [f"{tmp_path}/mine.py"]
