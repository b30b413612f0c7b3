"""``graphfuse new-plugin``: the package it writes, and the names and folders it refuses. That the package can be
installed and passes its own tests is in tests/package/test_plugin_packages.py."""

import ast
import errno
import os
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


WRONG = ["", "Norm", "7up", "a b", "a--b", "a.b", "../a", "-a", "a-", "lambda", "select", "a" * 101, "a" * 250]
TAKEN = ["torch", "rows", "emulator", "cudnn", "epilogue", "typing-extensions"]


@pytest.mark.parametrize("name", [*WRONG, *TAKEN], ids=lambda name: name[:20])
def test_names_that_cannot_be_one(run, tmp_path, monkeypatch, name):
    """Of a Python package and a distribution at once; or that another has."""
    monkeypatch.chdir(tmp_path)
    done = run("new-plugin", "--", name)
    assert done.exit_code == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["true", "constexpr", "exp", "printf", "size-t", "noexcept", "float", "main", "gf"])
def test_names_that_mean_something_in_cpp(run, tmp_path, name):
    """The kernel has another. That it compiles is in tests/package/test_plugin_packages.py."""
    done = run("new-plugin", name, "--folder", tmp_path / "here")
    package = name.replace("-", "_")
    code = tmp_path / "here" / "src" / package
    assert done.exit_code == 0, done.output
    assert f" {package}_kernel(const X* x" in (code / f"{package}.cu").read_text()
    assert f'entry = "{package}_kernel"' in (code / "engine.py").read_text()


def test_folders_without_init_are_installed_elsewhere_only(run, tmp_path, monkeypatch):
    """As cuda and nvidia are. One in the working directory is no package of anybody, one below it may be."""
    site = tmp_path / "venv" / "site-packages"
    (site / "soft_cap").mkdir(parents=True)
    (tmp_path / "soft_sign").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend("")
    done = run("new-plugin", "soft-cap", "--folder", "here")
    assert done.exit_code == 2 and "is installed" in done.output and not (tmp_path / "here").exists()
    done = run("new-plugin", "soft-sign", "--folder", "here")
    assert done.exit_code == 0, done.output


def test_a_distribution_with_modules_of_another_name(run, tmp_path, monkeypatch):
    about = tmp_path / "Soft.Cap-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: Soft.Cap\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("soft-cap", "soft_cap"):
        done = run("new-plugin", name, "--folder", tmp_path / "here")
        assert done.exit_code == 2 and "Soft.Cap 1.2" in done.output and not (tmp_path / "here").exists()


def test_a_folder_that_is_there_stays_as_it_is(run, tmp_path):
    (tmp_path / "mine").mkdir()
    done = run("new-plugin", "soft_cap", "--folder", tmp_path / "mine")
    assert done.exit_code == 2 and "exists" in done.output and not list((tmp_path / "mine").iterdir())


def test_a_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("new-plugin", "soft_cap", "--folder", tmp_path / "file" / "below")
    assert done.exit_code == 1 and "cannot be made" in done.output


def test_nothing_is_left_of_a_package_that_cannot_be_written(run, tmp_path, monkeypatch):
    write, left = Path.write_text, [3]

    def full(path, *arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **options)

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(Path, "write_text", full)
    done = run("new-plugin", "soft_cap", "--folder", tmp_path / "mine" / "here" / "deep")
    assert done.exit_code == 1 and "cannot be made: No space left" in done.output
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"] and not list((tmp_path / "mine").iterdir())


def test_the_longest_name_is_written(run, tmp_path):
    assert run("new-plugin", "a" * 100, "--folder", tmp_path / "here").exit_code == 0
