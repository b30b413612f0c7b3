"""What the runtime tests share: a clean environment and a second Python."""

import os
import subprocess
import sys

import pytest

VARIABLES = (
    "GRAPHFUSE_DEVICE",
    "GRAPHFUSE_CACHE_DIR",
    "GRAPHFUSE_CACHE_LIMIT",
    "GRAPHFUSE_TUNING_DIR",
    "GRAPHFUSE_CUDNN",
    "GRAPHFUSE_PLUGINS",
    "GRAPHFUSE_RANKS_TIMEOUT",
    "GRAPHFUSE_VERIFY",
    "CUDA_HOME",
    "CUDA_PATH",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No variable of the outside world, and a kernel cache and tuned knobs of the test's own."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path / "tuning"))


@pytest.fixture
def python():
    """Run code in a new process: python(code, NAME=value...) -> its standard output."""

    def run(code: str, *arguments: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
