"""Every example runs and finds its own result right."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
# Losses are learned, and agree, long before all steps are done.
ARGUMENTS = {"train_decoder": ("--steps", "40")}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path, tmp_path):
    command = [sys.executable, path, *ARGUMENTS.get(path.stem, ())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(engine in done.stdout for engine in ("reference", "rows", "add_relu", "agree", "fused_add_rmsnorm"))


def test_there_are_examples():
    assert {"rmsnorm_silu", "wan_vae_l2norm", "quantized_outputs", "step_by_step"} <= {p.stem for p in EXAMPLES}
