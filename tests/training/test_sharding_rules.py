"""The rules by which operators are split, from their declarations: what they are, where they are told, and when torch
hears of them."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from graphfuse.functional.axes import axes
from graphfuse.functional.operator import FUNCTIONS
from graphfuse.functional.sharding import splittable
from graphfuse.torch import sharding

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
HEAD = "| operators | whole on every rank | split by samples alone | added up | hidden dimension |"


def found(name, **shapes):
    f = FUNCTIONS[f"graphfuse::{name}"]
    used = [a for a in f.arguments if a.name in shapes or not a.optional and a.only is None]
    return used, axes(used, shapes)


def test_each_dimension_follows_one_of_the_first_tensor():
    _, of = found("rms_norm_backward", dy=(4, 6, 64), x=(4, 6, 64), weight=(64,))
    assert of["dx"] == of["x"] == (0, 1, 2)
    assert of["weight"] == of["dweight"] == (2,)
    assert of["inverse_rms"] == (0, 1, None)


def test_heads():
    _, of = found("rms_norm", x=(4, 6, 64), weight=(6, 64))
    assert of["weight"] == (1, 2)
    _, of = found("qk_rmsnorm", q=(5, 8, 64), k=(5, 2, 64), q_weight=(8, 64), k_weight=(64,))
    assert of["k"] == (0, 1, 2) and of["q_weight"] == (1, 2) and of["k_weight"] == (2,)


def test_samples():
    for shape, want in {
        (4, 1, 64): (0, None, 2),
        (64,): (2,),
        (1, 1, 64): (None, None, 2),
        (4, 6, 64): (0, 1, 2),
    }.items():
        _, of = found("adalayernorm", input=(4, 6, 64), scale=shape, shift=shape)
        assert of["scale"] == of["shift"] == want


def test_blocks_and_tiles():
    used, of = found("rmsnorm_fp4quant", input=(4, 6, 64), weight=(64,))
    assert of["block_scale"] == (0, 1, None) and of["y_fp4"] == (0, 1, 2) and splittable(used, of) == (0, 1)
    used, of = found("add_rmsnorm_fp4quant_both_layouts", input=(4, 6, 64), residual=(4, 6, 64), weight=(64,))
    assert of["block_scale"] == (None,) and splittable(used, of) == ()


def test_what_is_added_up_is_said_of_every_result_without_rows():
    """One that is not cannot be split. Gradients of parameters, and nothing else so far, are made over rows."""
    for rule in sharding.rules():
        results = {a.name for a in FUNCTIONS[f"graphfuse::{rule.name}"].arguments if a.written}
        made_over_rows = results & {"dweight", "dbias", "dscale", "dshift", "dq_weight", "dk_weight"}
        assert dict(rule.added) == dict.fromkeys(made_over_rows, "sum"), rule.name
        # Scales in tiles, and caches with slots of any row.
        assert rule.rows == (rule.name not in ("add_rmsnorm_fp4quant_both_layouts", "qk_norm_rope_cache"))


def rendered() -> list[str]:
    """The table of docs/sharding.md. Operators of one name and step are one."""
    rules = {rule.name: rule for rule in sharding.rules() if not rule.name.startswith("of_")}  # as tests name theirs
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, rule in rules.items():
        if name.removesuffix("_training").removesuffix("_backward") != name and name != "cross_entropy_backward":
            continue
        backward = rules.get(f"{name}_backward", rule)
        whole = ", ".join(rule.whole if rule.rows else ("everything",))
        columns = "two steps" if rule.columns else "gathered"
        added = ", ".join(f"{n} ({how})" for n, how in backward.added)
        groups.setdefault((whole, ", ".join(rule.by_sample), added, columns), []).append(f"`{name}`")
    return [" ".join(f"| {' | '.join((', '.join(names), *cells))} |".split()) for cells, names in groups.items()]


def test_the_table_of_the_guide():
    lines = (ROOT / "docs" / "sharding.md").read_text().splitlines()
    start = lines.index(HEAD) + 2
    told = [*itertools.takewhile(lambda line: line.startswith("|"), lines[start:])]
    assert told == rendered(), "\n".join(rendered())


PROGRAM = """
import sys, graphfuse.torch, torch
from graphfuse import functional
graphfuse.torch.RMSNorm(8)(torch.ones(2, 8)); functional.rmsnorm(torch.ones(2, 8), torch.ones(8))
assert "torch.distributed.tensor" not in sys.modules and not functional.sharding._known
"""
THEN = {
    "a module": "import torch.distributed.tensor; graphfuse.torch.LayerNorm(8)",
    "asked": "graphfuse.torch.sharding.register(); graphfuse.torch.sharding.register()",
}


@pytest.mark.some(1)
@pytest.mark.parametrize("then", THEN)
def test_torch_hears_of_rules_when_there_are_dtensors(then):
    every = "len(functional.operator.FUNCTIONS) + len(functional.sharding.OTHERS)"
    program = PROGRAM + THEN[then] + f"\nassert len(functional.sharding._known) == {every}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
