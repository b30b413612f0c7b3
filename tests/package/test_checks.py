"""The checks of the sources are the same wherever they run."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_checked_before_a_commit_is_what_make_check_runs():
    dry = subprocess.run(["make", "--dry-run", "check"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Before the checks, where it was not done yet: the installation.
    commands = [line for line in dry.splitlines() if line.startswith(".venv/bin/") and " pip install " not in line]
    assert len(commands) >= 3
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ +entry: (.*)$", hooks, re.MULTILINE) == commands
    # With no other host than the tree's own environment, and with the same files as make's.
    assert re.findall(r"repo: (.*)", hooks) == ["local"]
    for setting in ("language: system", "pass_filenames: false"):
        assert hooks.count(setting) == len(commands)
