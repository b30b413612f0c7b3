"""Every example runs and finds its own result right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path, tmp_path):
    variables = {**os.environ, "GRAPHFUSE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference" in done.stdout or "rmsnorm" in done.stdout


def test_there_are_examples():
    assert {"rmsnorm_silu", "wan_vae_l2norm", "quantized_outputs", "step_by_step"} <= {p.stem for p in EXAMPLES}
