"""The scripts of `examples`, as tests run them: on the CPU in forks of one process that has imported torch."""

import os
import runpy
import sys
import traceback
from pathlib import Path

import pytest
import torch

from support import ranks

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
_NEEDS = {"wan_vae_decode": "diffusers"}


def run(path: Path, *arguments: str, cwd: Path) -> str:
    """What a script prints. Skips the test where a package that the script needs is not installed."""
    if path.stem in _NEEDS:
        pytest.importorskip(_NEEDS[path.stem])
    printed = cwd / "printed"
    process = ranks.context(torch.cuda.is_available()).Process(target=_script, args=(path, arguments, cwd, printed))
    process.start()
    process.join()
    told = printed.read_text()
    assert process.exitcode == 0, told
    return told


def _script(path: Path, arguments: tuple[str, ...], cwd: Path, printed: Path) -> None:
    """The script as Python runs one, by its name."""
    file = os.open(printed, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(cwd)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
