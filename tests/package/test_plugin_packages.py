"""The package that new-plugin writes passes its own tests where it is installed. Under its own name it is the example
(tests/cli/test_new_plugin.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphfuse import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin_bias_gelu"

pytestmark = pytest.mark.emulate


def python(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRAPHFUSE_PLUGINS", "PYTEST_"))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env | variables)


def test_it_passes_its_own_tests(tmp_path):
    """Beside this graphfuse; no network is asked. Its name is one that C++ has a type of."""
    folder = tmp_path / "size_t"
    done = CliRunner().invoke(cli.app, ["new-plugin", "size-t", "--folder", str(folder)])
    assert done.exit_code == 0, done.output
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    done = python("-m", "pip", "install", *offline, "--target", tmp_path / "target", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = python("-m", "pytest", "-q", folder / "tests", cwd=tmp_path, PYTHONPATH=str(tmp_path / "target"))
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_is_short():
    lines = [line for path in EXAMPLE.rglob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) < 150
