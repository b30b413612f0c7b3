"""Every example runs and finds its own result right."""

import re

import pytest

from support.example_scripts import EXAMPLES, run

# Losses are learned, and agree, long before all steps are done.
ARGUMENTS = {"train_decoder": ("--steps", "40")}


# Engines in running order, and whether anything is saved.
WHOLE = {
    "wan_vae_block": (["rows", "reference", "rows", "reference", "rows"], True),
    "decoder_half_layer": (["rows", "reference", "rows", "reference", "rows"], True),
    "qk_norm_attention": (["rows", "rows", "reference"], False),
}


# Its modules are a first case of tests/training/test_sharded.py, also on two ranks; each imports torch anew.
FURTHER = {"sequence_parallel"}


@pytest.mark.some(5)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.further] * (path.stem in FURTHER))
        for path in EXAMPLES
        if path.stem not in WHOLE
    ],
)
def test_example(path, tmp_path):
    told = run(path, *ARGUMENTS.get(path.stem, ()), cwd=tmp_path)
    assert any(engine in told for engine in ("reference", "rows", "add_relu", "agree", "fused_add_rmsnorm"))


def test_there_are_examples():
    assert {"rmsnorm_silu", "wan_vae_l2norm", "quantized_outputs", "step_by_step", *WHOLE} <= {p.stem for p in EXAMPLES}


@pytest.mark.emulate
@pytest.mark.some(1)
@pytest.mark.parametrize("name", WHOLE)
def test_examples_of_whole_graphs_tell_regions_engines_and_bytes(name, tmp_path):
    engines, less = WHOLE[name]
    path = next(p for p in EXAMPLES if p.stem == name)
    told = run(path, cwd=tmp_path)
    chosen = told.partition("\nchosen\n")[2].partition("\n  because ")[0].splitlines()
    assert [line.split()[0].partition("[")[0] for line in chosen] == engines
    read, written, read_before, written_before = map(
        int, re.search(r"(\d+) read, (\d+) written; one kernel a node: (\d+) read, (\d+) written", told).groups()
    )
    saved = sum(int(n) for n in re.findall(r"saves (\d+) bytes\)", told))
    assert read_before + written_before - read - written == saved and (saved > 0) is less
    assert f"matches are fused, which saves {saved} bytes; no other choice that engines take saves more" in told
