"""The problem sizes of the cuDNN frontend's table: 8 column counts x 5 row counts x 3 outputs."""

import pytest
import torch

from support import graphs, oracle
from support.graphs import BF16, E4M3, FLOAT, FP4, Norm

pytestmark = pytest.mark.gpu

COLUMNS = (64, 128, 160, 256, 320, 512, 640, 1024)
ROWS = (1560, 6240, 24960, 99840, 399360)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_sweep(columns, rows):
    """bf16 within one ulp of the rounded float64 result; FP8 and NVFP4 the quantizer of the float32 values."""
    pack = Norm(rows, columns).inputs("cuda")
    made = {}
    for name, case in {
        "float32": Norm(rows, columns, output=FLOAT),
        "bf16": Norm(rows, columns, output=BF16),
        "fp8": Norm(rows, columns, output=E4M3),
        "nvfp4": Norm(rows, columns, output=FP4, blocks=True),
    }.items():
        outputs = case.outputs("cuda")
        graphs.fused(case).execute(pack | outputs)
        made[name] = outputs
    for start in range(0, rows, part := (1 << 25) // columns):
        rows_ = slice(start, start + part)
        exact = Norm(rows, columns).exact(pack | {"x": pack["x"][rows_]})["out"]
        values = made["float32"]["out"][rows_]
        torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-30)
        bf16 = made["bf16"]["out"][rows_]
        assert oracle.ulps(bf16, oracle.rounded(exact, torch.bfloat16)).max() <= 1
        assert torch.equal(bf16, values.bfloat16())
        assert torch.equal(made["fp8"]["out"][rows_].view(torch.uint8), oracle.fp8_search(values, "e4m3"))
        codes, scales = oracle.nvfp4_search(values)
        assert torch.equal(made["nvfp4"]["block_scale"][rows_], scales)
        assert torch.equal(made["nvfp4"]["out"][rows_], codes)
