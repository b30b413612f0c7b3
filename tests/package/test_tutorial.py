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


def run(snippets: list[str], folder: Path, device: str | None = None) -> list[str]:
    """What each of them prints. device: for GRAPHFUSE_DEVICE; without it they ask for the emulator themselves."""
    script = folder / "tutorial.py"
    script.write_text(f"\nprint({MARK!r})\n".join(snippets))
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRAPHFUSE_DEVICE")} | {"CUDA_VISIBLE_DEVICES": ""}
    env |= {"GRAPHFUSE_DEVICE": device} if device else {}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [text.removeprefix("\n") for text in done.stdout.split(MARK)]


def test_the_first_graphs_of_the_front_pages_run(tmp_path):
    """As they say for machines without a GPU, on fewer rows."""
    end = "want = torch.nn.functional.silu(torch.nn.functional.rms_norm(x.double(), (512,), w[0].double(), 1e-6))\n"
    end += "print('close' if (out.double() - want).norm() < 0.04 * want.norm() else 'far')\n"
    snippets = []
    for page in ("README.md", "docs/index.md"):
        (first, _), *_ = SNIPPET.findall((ROOT / page).read_text())
        assert 'device = "cuda"' in first and "24960" in first
        snippets += [first.replace('device = "cuda"', 'device = "cpu"').replace("24960", "156"), end]
    assert run(snippets, tmp_path, "emulator")[1::2] == ["close\n"] * 2


def test_every_snippet_prints_what_is_shown(tmp_path):
    found = SNIPPET.findall((ROOT / "docs" / "tutorial.md").read_text())
    snippets, wanted = zip(*found, strict=True)
    assert len(snippets) > 10 and sum(map(bool, wanted)) > 7
    same = doctest.OutputChecker().check_output
    for want, got in zip(wanted, run(list(snippets), tmp_path), strict=True):
        assert same(want, got, doctest.ELLIPSIS), f"shown:\n{want}\nprinted:\n{got}"
