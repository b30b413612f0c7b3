"""The editable installation that make makes is found before a folder of the path that is called graphfuse."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As setuptools leaves it: its finder is asked last. Then what make adds, if anything; then a folder of that name.
PROGRAM = """
import sys
ours = [f for f in sys.meta_path if getattr(f, "__module__", "").startswith("__editable___graphfuse_")]
if not ours:
    print("not editable")
    sys.exit()
for finder in ours:
    sys.meta_path.remove(finder)
sys.meta_path += ours
exec(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import graphfuse
print(getattr(graphfuse, "__version__", "no version"))
"""


def line(target: str) -> str:
    """What make writes into a .pth file beside an installation."""
    command = ["make", "--dry-run", "--always-make", "HAS_GPU=", target]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (wanted,) = (text for text in lines if text.startswith("echo ") and text.endswith('/graphfuse.pth"'))
    return wanted.split("'")[1]


def imported(code: str, folder: Path) -> str:
    (folder / "graphfuse").mkdir(exist_ok=True)  # as a clone is: a folder without __init__.py
    command = [sys.executable, "-c", PROGRAM, code, str(folder)]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    return pytest.skip("this is no editable installation") if said == "not editable" else said


@pytest.mark.parametrize("target", [".venv/runnable", ".venv/installed"])
def test_a_clone_beside_a_script_is_not_taken_for_the_package(target, tmp_path):
    import graphfuse

    assert imported("", tmp_path) == "no version"  # as without it: else this tests nothing
    assert imported(line(target), tmp_path) == graphfuse.__version__
