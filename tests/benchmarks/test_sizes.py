"""The sizes that are tuned and judged on, and the command's way through them."""

import pytest
from typer.testing import CliRunner

from graphfuse.base.device import for_arch
from graphfuse.benchmarks import record, sizes, tuning
from graphfuse.cli import app
from graphfuse.tuned_tables.entry import Source, TunedEntry

SIZES = (*sizes.seeds(), *sizes.off_the_table())


def test_the_seeds_120():
    assert len(set(sizes.seeds())) == 120


def test_the_random_ones_are_others_and_stay():
    found = sizes.off_the_table()
    assert len(set(found)) == 60 and not set(found) & set(sizes.seeds()) and found == sizes.off_the_table()
    assert {s.output for s in found} == set(sizes.OUTPUTS)
    assert all(32 <= s.columns <= 16384 and 1 <= s.rows <= 1_000_000 for s in found)
    assert all(s.rows * s.row_bytes <= sizes.MOST_BYTES and (s.output != "nvfp4" or s.columns % 16 == 0) for s in found)
    assert sum(s.columns % 8 > 0 for s in found) >= 5 and sum(s.rows < 100 for s in found) >= 5


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1], SIZES[-2], SIZES[-3]], ids=str)
def test_a_size_is_one_kernel_and_its_bytes_are_those_of_its_tensors(size):
    (part,) = size.plans(for_arch("sm_90a"))[0].parts
    assert part.engine.name == "rows" and part.why == "heuristic"
    graph = part.region.subgraph.graph
    tensors = [graph.tensors[t] for t in (*part.region.subgraph.inputs, *part.region.subgraph.outputs)]
    assert sum(t.nbytes for t in tensors if not t.by_value) == size.moved


def run(*arguments: str):
    return CliRunner().invoke(app, ["tune", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "fp3"), "bf16, fp8_e4m3, nvfp4"),
        (("--rows", "0"), "1 or more"),
        (("--columns", "100"), "multiples of 16"),
        (("--time-budget", "0"), "seconds above 0"),
        (("norms",), "is no bench; there are: rmsnorm-silu"),
        (("add-rmsnorm", "--rows", "7"), "rows 7: add-rmsnorm has 1, 16"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.output


def test_without_a_gpu_it_says_so():
    if record.no_gpu() is None:
        pytest.skip("there is one")
    done = run("--quick")
    assert done.exit_code == 3 and "graphfuse tune needs a GPU: " in done.output


def test_what_is_tuned_is_known_again():
    part, other = (sizes.Size(r, 64, "bf16").plans(for_arch("sm_90a"))[0].parts[0] for r in (100, 101))
    problem = part.engine.problem(part.facts)
    made = TunedEntry(Source("user", "H200", "sm_90"), part.engine.name, problem.key, problem.rows, {})
    assert tuning.tuned(part, (made,)) and not tuning.tuned(other, (made,))
