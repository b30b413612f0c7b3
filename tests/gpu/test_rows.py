"""Every combination of what stands around an RMSNorm as one generated kernel on the GPU."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from graphfuse import heur_mode
from support import graphs, rows
from support.graphs import BF16
from support.rows import CASES, Case

pytestmark = pytest.mark.gpu

COLUMNS = (1, 17, 111, 760, 3420, 3584, 7168, 16384, 65537, 131072, 262144)


@pytest.mark.parametrize("end", rows.ENDS)
def test_every_combination(end):
    cases = [case for case in CASES if case.end == end]
    with ThreadPoolExecutor(8) as pool:  # most of it is compiling
        list(pool.map(lambda case: rows.check(case, [heur_mode.OPENSOURCE], "cuda", "cuda"), cases))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("end", ["bf16", "fp8 per row", "mxfp8", "nvfp4"])
def test_row_lengths(columns, end):
    if columns % {"mxfp8": 32, "nvfp4": 16}.get(end, 1):
        pytest.skip("no whole number of blocks")
    rows.check(Case(True, "plain", "gate", end, "some", 3, columns), [heur_mode.OPENSOURCE], "cuda", "cuda")


@pytest.mark.parametrize("columns", [111, 4096, 65536])
def test_a_row_is_the_same_alone_and_among_others(columns):
    case = Case(True, "plain", "silu", "bf16", "all", 4096, columns)
    whole, results = case.inputs("cuda"), {}
    for count in (1, 255, 256, 4096):
        part = replace(case, rows=count)
        pack = {n: t if n == "weight" else t[:count].contiguous() for n, t in whole.items()}
        outputs = part.outputs("cuda")
        graphs.run(part.graph("cuda"), pack | outputs, [heur_mode.OPENSOURCE], "cuda")
        results[count] = {n: t[0].clone() for n, t in outputs.items()}
    for count in (255, 256, 4096):
        assert all(torch.equal(results[1][n], t) for n, t in results[count].items())


@pytest.mark.parametrize("shape", [(5, 1, 24), (3, 37, 4096), (4096, 2, 11008), (2, 3, 1001)])
@pytest.mark.parametrize("last", [True, False])
def test_what_reduces_nothing_reads_slices_where_they_lie(shape, last):
    """SiLU of the first half, times the second; the halves are along the last axis, or the one before."""
    axis = 2 if last else 1
    both = torch.randn([2 * e if d == axis else e for d, e in enumerate(shape)], device="cuda").bfloat16()
    g = graphs.new(device="cuda")
    x, whole = g.tensor_like(both).set_name("x"), [slice(None)] * 3
    half = shape[axis]
    gate, up = (g.slice(x, [*whole[:axis], slice(n, n + half), *whole[axis + 1 :]]) for n in (0, half))
    g.mul(g.swish(gate), up).set_output().set_name("out").set_data_type(BF16)
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    graphs.run(g, {"x": both, "out": out}, [heur_mode.OPENSOURCE], "cuda")
    assert len(g._planner.plans[0].parts) == 1
    gate, up = both.double().chunk(2, axis)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-6)
