"""Rows of one byte an element, as the engine of rows reads them: masks and FP8, with and without sums over rows."""

import pytest
import torch

from graphfuse import data_type, heur_mode, reduction_mode
from support import graphs

TYPES = {
    data_type.BOOLEAN: torch.bool,
    data_type.FP8_E4M3: torch.float8_e4m3fn,
    data_type.FP8_E5M2: torch.float8_e5m2,
}


def narrow(dtype, rows, columns):
    made = torch.randn(rows, columns, generator=graphs.generator("cpu", 7))
    return made > 0 if dtype is data_type.BOOLEAN else made.to(TYPES[dtype])


@pytest.mark.emulate
@pytest.mark.parametrize("rows, columns", [(4, 256), (5, 257), (3, 8192), (2, 33000)])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_rows_of_one_byte(dtype, rows, columns):
    g = graphs.new(device="emulator", io_data_type=data_type.BFLOAT16)
    x, m = g.tensor([rows, columns], name="x"), g.tensor([rows, columns], name="m", data_type=dtype)
    mixed = g.binary_select(-1.5, x, m) if dtype is data_type.BOOLEAN else g.add(x, m)
    g.softmax(mixed).set_output().set_name("y").set_data_type(data_type.FLOAT)
    total = g.reduction(g.mul(mixed, x), mode=reduction_mode.ADD).set_output().set_name("total").set_dim([1, columns])
    total.set_data_type(data_type.FLOAT)
    g.build([heur_mode.OPENSOURCE])
    given = {"x": torch.randn(rows, columns, generator=graphs.generator("cpu", 8)).bfloat16()}
    given["m"] = narrow(dtype, rows, columns)
    made = {"y": torch.empty(rows, columns), "total": torch.empty(1, columns)}
    g.execute(given | made, torch.empty(g.get_workspace_size(), dtype=torch.uint8))
    x, m = given["x"].double(), given["m"]
    mixed = torch.where(m, -1.5, x) if dtype is data_type.BOOLEAN else x + m.double()
    torch.testing.assert_close(made["y"].double(), mixed.softmax(1), rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(made["total"].double(), (mixed * x).sum(0, keepdim=True), rtol=2e-6, atol=1e-5)
