"""The command line in this process, on caches of the test's own."""

import json

import pytest
from typer.testing import CliRunner

from graphfuse import cli


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    for name in ("GRAPHFUSE_DEVICE", "GRAPHFUSE_CACHE_LIMIT", "GRAPHFUSE_VERIFY", "GRAPHFUSE_RANKS_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path / "tuning"))


@pytest.fixture
def run():
    """run(*arguments) -> exit code and output."""

    def run(*arguments: str):
        done = CliRunner().invoke(cli.app, list(map(str, arguments)))
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return run


@pytest.fixture
def answer(run):
    """answer(*arguments, code=0) -> what the command prints as JSON."""

    def answer(*arguments: str, code: int = 0):
        done = run(*arguments, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    return answer
