"""Which lane runs what: `make test` has a case of every test, CI runs the others, and no test is in neither."""

import re
import subprocess
from pathlib import Path

import pytest

from support import covering

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MAKEFILE = (ROOT / "Makefile").read_text()

# What another version of torch can change.
TORCH = re.compile(
    r"torch\.(compile|library|func|export|fx|jit|distributed)\b|torch\._\w|functorch|\bDTensor|make_fx|opcheck"
)
# These name it only, or run kernels on the emulator.
OTHERWISE = {
    "benchmarks/test_docs.py",
    "benchmarks/test_followers.py",
    "benchmarks/test_figures.py",
    "benchmarks/test_models.py",
    "cli/test_docs.py",
    "api/test_repeated_execute.py",
    "functional/test_cross_entropy.py",
    "functional/test_rope.py",
    "functional/test_rope_across_heads.py",
    "training/test_cross_entropy.py",
}


def test_what_torch_can_change_is_tested_on_other_versions():
    files = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.glob("*/test_*.py")}
    uses = {n for n, text in files.items() if TORCH.search(text) and not n.startswith(("gpu/", "lanes/"))}
    marked = {n for n, text in files.items() if re.search(r"^pytestmark = .*pytest\.mark\.torch\b", text, re.MULTILINE)}
    assert uses - marked == OTHERWISE


def expressions(target: str) -> list[str]:
    """What pytest is asked to run by a target of the Makefile, as make would; "" is the default of pyproject.toml."""
    command = ["make", "--dry-run", "--always-make", "HAS_GPU=", "TORCH=oldest", target]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in lines.replace("\\\n", " ").splitlines() if " -m pytest " in line]
    return [(re.findall(r" -m '([^']*)'", line) or [""])[0] for line in lines]


def test_lanes_leave_nothing_out():
    (first,), (further,), (everything,) = map(expressions, ("test", "test-further", "test-all"))
    assert first == "not (gpu or thorough or further)"
    assert further == "further and not (gpu or thorough)"
    assert everything == "not gpu"
    (torch,) = expressions("test-torch")
    assert torch == "torch and not (gpu or thorough or further or emulate)"


def test_ci_runs_all_lanes_that_need_no_gpu():
    ran = re.findall(r"^make (.+?)(?: &)?$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    targets = [words for words in ran if words.startswith(("check", "docs", "test"))]
    assert targets == [
        "check",
        "docs",
        "test",
        "test-torch TORCH=oldest TURN=1/2",
        "test-further",
        "test-torch TORCH=newest TURN=2/2",
    ]


PROGRAM = """
import pytest
@pytest.mark.parametrize("x", [0, 1, 2])
@pytest.mark.parametrize("y", ["a", "b", pytest.param("c", marks=pytest.mark.gpu)])
def test_matrix(x, y): pass
@pytest.mark.parametrize("x,y", [(0, "a"), (1, "a"), (1, "b")])
@pytest.mark.parametrize("z", "cde")
@pytest.mark.parametrize("u", "fg")
def test_three(x, y, z, u): pass
@pytest.mark.each_value
@pytest.mark.parametrize("x,y", [(0, "a"), (1, "a"), (1, "b")])
def test_pairs(x, y): pass
@pytest.mark.some(2)
@pytest.mark.parametrize("x", range(6))
def test_list(x): pass
@pytest.mark.some(1, 2)
@pytest.mark.parametrize("x", range(9))
def test_long_list(x): pass
def test_alone(): pass
"""


@pytest.fixture
def selected(tmp_path):
    """Names of PROGRAM's cases that an expression selects, with this folder's conftest."""
    import os
    import sys

    (tmp_path / "test_it.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())

    def names(expression: str, *more: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", expression]
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run([*command, *more, "."], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return set(re.findall(r"::(\S+)", done.stdout))

    return names


def test_stand_ins(selected):
    """Every value of every list and every test is among the first, every pair of values among those and further ones;
    with thorough ones they are all."""
    first, further = selected("not (gpu or further or thorough)"), selected("further and not gpu")
    left = selected("thorough and not gpu")
    assert not (first & further or first & left or further & left)
    assert first | further | left == selected("not gpu") and len(first | further | left) == 6 + 18 + 3 + 6 + 9 + 1
    three = [name[11:-1].split("-", 2) for name in first | further if name.startswith("test_three")]
    for these, pairs in (((0, 1), 6), ((0, 2), 6), ((1, 2), 9)):
        assert len({tuple(case[n] for n in these) for case in three}) == pairs
    assert len(three) + len(left) == 18 + 6 and len(three) < 18
    assert {n for n in first | further if n.startswith("test_long")} == {f"test_long_list[{n}]" for n in (0, 3, 6)}
    assert len([name for name in first if name.startswith("test_three")]) == 3
    assert {"test_pairs[0-a]", "test_pairs[1-b]"} == {name for name in first if name.startswith("test_pairs")}
    matrix = [name for name in first if name.startswith("test_matrix")]
    assert len(matrix) == 3 and {c for name in matrix for c in re.findall(r"[ab012]", name[12:])} == set("ab012")
    assert {"test_list[0]", "test_list[3]", "test_alone"} == {n for n in first if n.startswith(("test_list", "test_a"))}


def test_runs_share_the_cases_of_each_test_but_the_first(selected):
    first = "not (gpu or further or thorough)"
    one, two = (selected(first, "--turn", turn) for turn in ("1/2", "2/2"))
    assert one | two == selected(first)
    assert {"test_list[0]", "test_alone"} < one & two and len(one & two) == 6


def test_few_cases_have_all_features():
    cases = [frozenset(x) for x in ("ab", "bc", "abcd", "e", "")]
    assert covering.covering(cases) == {2, 3}
    assert covering.covering(cases, {1}) == {1, 2, 3} and covering.covering([]) == set()
    assert covering.pairs(frozenset("abc")) == {frozenset(pair) for pair in ("ab", "ac", "bc")}
    assert covering.pairs(frozenset("a")) == {"a"}
    assert covering.spread(7, 3) == {0, 2, 4} and covering.spread(2, 3) == {0, 1}


def test_every_test_that_the_table_of_claims_names_is_there():
    text = (ROOT / "docs" / "testing.md").read_text()
    table = text.partition("\n## Which lane holds which claim\n")[2].partition("\n## ")[0]
    named = re.findall(r"`tests/([\w/.*]+)`", table)
    assert len(named) > 30
    assert [name for name in named if not list(TESTS.glob(name))] == []
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert {Path(name).parts[0] for name in named} == folders
