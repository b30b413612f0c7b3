"""Packages of plug-ins pass their own tests where they are installed: the example's, and what new-plugin writes."""

import os
import shutil
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


def test_both_pass_their_own_tests(tmp_path):
    """Where they are installed, beside this graphfuse and each other; no network is asked."""
    done = CliRunner().invoke(cli.app, ["new-plugin", "soft-relu", "--folder", str(tmp_path / "soft_relu")])
    assert done.exit_code == 0, done.output
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    sources = [tmp_path / "soft_relu", tmp_path / "example"]
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    done = python("-m", "pip", "install", *offline, "--target", tmp_path / "target", *sources, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = [source / "tests" for source in sources]
    done = python("-m", "pytest", "-q", *tests, cwd=tmp_path, PYTHONPATH=str(tmp_path / "target"))
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_is_short():
    lines = [line for path in EXAMPLE.rglob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) < 150
