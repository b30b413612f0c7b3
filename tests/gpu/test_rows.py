"""Every combination of what stands around an RMSNorm as one generated kernel on the GPU."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from graphfuse import heur_mode
from support import graphs, rows
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
