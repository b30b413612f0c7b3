"""The scripts of `examples`, as tests run them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
_NEEDS = {"wan_vae_decode": "diffusers"}


def run(path: Path, *arguments: str, cwd: Path) -> str:
    """What a script prints. Skips the test where a package that the script needs is not installed."""
    if path.stem in _NEEDS:
        pytest.importorskip(_NEEDS[path.stem])
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
