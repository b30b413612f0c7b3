"""The tutorial runs as printed: its snippets in one session, each with the output that is shown behind it."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
MARK = "<end of a snippet>"

pytestmark = pytest.mark.emulate


def run(snippets: list[str], folder: Path) -> list[str]:
    """What each of them prints, on the emulator."""
    script = folder / "tutorial.py"
    script.write_text(f"\nprint({MARK!r})\n".join(snippets))
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRAPHFUSE_DEVICE")} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [text.removeprefix("\n") for text in done.stdout.split(MARK)]


def test_every_snippet_prints_what_is_shown(tmp_path):
    found = SNIPPET.findall((ROOT / "docs" / "tutorial.md").read_text())
    snippets, wanted = zip(*found, strict=True)
    assert len(snippets) > 10 and sum(map(bool, wanted)) > 7
    same = doctest.OutputChecker().check_output
    for want, got in zip(wanted, run(list(snippets), tmp_path), strict=True):
        assert same(want, got, doctest.ELLIPSIS), f"shown:\n{want}\nprinted:\n{got}"
