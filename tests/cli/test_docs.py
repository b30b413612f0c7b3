"""What the docs say of commands, settings and errors is what there is."""

import ast
import re
from pathlib import Path

import pytest
import typer.main

import graphfuse.torch
from graphfuse import functional
from graphfuse.base import errors, settings
from graphfuse.cli import app
from graphfuse.ops import OPS, SPELLINGS

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "command-line.md").read_text()
FOLDERS = ("benchmarks", "docs", "engines", "examples", "graphfuse", "patterns", "tests")
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "troubleshooting.md", ROOT / "CHANGELOG.md"]


def commands(group=None, before: str = "") -> list[str]:
    found = []
    for name, command in (group or typer.main.get_command(app)).commands.items():
        found += commands(command, f"{before}{name} ") if hasattr(command, "commands") else [before + name]
    return found


def table(heading: str) -> list[str]:
    """The first cells of the table under a heading, or that begins with a cell."""
    lines = GUIDE[GUIDE.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---") or line.startswith("|--:"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip())
    return rows


def test_the_table_of_commands_has_all_of_them():
    told = [name for cell in table("| command | does |") for name in re.findall(r"`([a-z-]+(?: [a-z]+)?)", cell)]
    assert sorted(told) == sorted(commands())


def test_every_command_prints_json_and_helps():
    def walk(group):
        for command in group.commands.values():
            yield from walk(command) if hasattr(command, "commands") else (command,)

    for command in walk(typer.main.get_command(app)):
        assert any("--json" in parameter.opts for parameter in command.params), command.name
        assert command.help, command.name


def test_every_variable_that_is_read_is_told():
    read = {
        node.value
        for node in ast.walk(ast.parse(Path(settings.__file__).read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", str(node.value))
    }
    units = set("KMG")
    assert read - units == set(settings.VARIABLES) | {"XDG_CACHE_HOME", "XDG_DATA_HOME"}
    told = {name for cell in table("| variable | meaning |") for name in re.findall(r"`(\w+)`", cell)}
    assert told == set(settings.VARIABLES) - {"GIT_COMMIT"}  # which is for records of this project
    assert all(name in settings.__doc__ for name in settings.VARIABLES)


def test_every_error_is_told_with_its_bases():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    told = {m[1]: set(re.findall(r"`(\w+)`", m[2])) for m in re.finditer(r"^\| `(\w+)` \| (.*?) \|", text, re.M)}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and c is not errors.GraphfuseError]
    assert told == {c.__name__: {b.__name__ for b in c.__bases__} - {"GraphfuseError"} for c in classes}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_files_and_targets_of_a_guide_are_there(guide):
    text = guide.read_text()
    paths = {path for path in re.findall(r"[\w.-]+(?:/[\w.-]+)+/?", text) if path.split("/")[0] in FOLDERS}
    assert paths or guide.name != "CONTRIBUTING.md"
    for path in paths:
        assert (ROOT / path.rstrip(".")).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets


def named(page: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", (ROOT / "docs" / page).read_text()))


def test_every_operation_is_named():
    missing = {*OPS, *SPELLINGS} - named("graphs.md")
    assert not missing, f"add to the table of operations in docs/graphs.md: {sorted(missing)}"


def test_every_function_and_operator_is_named():
    assert {name for name in functional.__all__ if name != "explain"} <= named("functional.md")
    training = (ROOT / "docs" / "training.md").read_text()
    assert all(re.search(rf"`{name}\b", training) for name in graphfuse.torch.__all__)


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
