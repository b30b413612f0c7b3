"""``graphfuse new-plugin``: the package it writes, and the names and folders it refuses. That the package can be
installed and passes its own tests is in tests/package/test_plugin_packages.py."""

import ast
from pathlib import Path

import pytest

from graphfuse.cli.new_plugin import FILES, TEMPLATE


def test_what_is_written(answer, tmp_path):
    told = answer("new-plugin", "my-norm", "--folder", tmp_path / "here" / "deep")
    assert told["name"] == "my_norm" and told["folder"] == str(tmp_path / "here" / "deep")
    files = sorted(str(p) for p in (tmp_path / "here").rglob("*") if p.is_file())
    assert files == sorted(told["files"]) and len(files) == len(FILES)
    for path in (tmp_path / "here").rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert "bias_gelu" not in text and "bias-gelu" not in text, path
            assert all(len(line) <= 120 for line in text.splitlines()), path
            if path.suffix == ".py":
                ast.parse(text)
    assert 'name = "my-norm"' in (tmp_path / "here" / "deep" / "pyproject.toml").read_text()


def test_under_its_own_name_it_is_the_example(answer, tmp_path):
    """And the example has no other file that git knows."""
    answer("new-plugin", "bias-gelu", "--folder", tmp_path / "here")
    assert all((tmp_path / "here" / path).read_bytes() == (TEMPLATE / path).read_bytes() for path in FILES)
    example = Path(__file__).parents[2] / "examples" / "plugin_bias_gelu"
    assert TEMPLATE.resolve() == example
    left = {"__pycache__", "build", ".pytest_cache"}
    there = [p.relative_to(example) for p in example.rglob("*") if p.is_file()]
    there = [p for p in there if not left & set(p.parts) and not any(part.endswith(".egg-info") for part in p.parts)]
    assert sorted(map(str, there)) == sorted(FILES)


def test_text_says_what_comes_next(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("new-plugin", "soft_cap")
    assert done.exit_code == 0 and "Next: cd soft_cap && pip install" in done.stdout
    assert (tmp_path / "soft_cap" / "src" / "soft_cap" / "soft_cap.cu").is_file()


@pytest.mark.parametrize(
    "name", ["", "Norm", "7up", "a b", "a--b", "a.b", "../a", "-a", "a-", "lambda", "select", "float", "torch", "rows"]
)
def test_names_that_cannot_be_one(run, tmp_path, monkeypatch, name):
    """Of a Python package, a distribution and a C++ function at once; or that another has."""
    monkeypatch.chdir(tmp_path)
    done = run("new-plugin", "--", name)
    assert done.exit_code == 2 and not list(tmp_path.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(run, tmp_path):
    (tmp_path / "mine").mkdir()
    done = run("new-plugin", "soft_cap", "--folder", tmp_path / "mine")
    assert done.exit_code == 2 and "exists" in done.output and not list((tmp_path / "mine").iterdir())


def test_a_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("new-plugin", "soft_cap", "--folder", tmp_path / "file" / "below")
    assert done.exit_code == 1 and "cannot be made" in done.output
