"""Rows whose second phase has more sums than the first, beside sums over rows."""

import pytest
import torch

from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode
from support import graphs

ROWS, COLUMNS = 5, 96


@pytest.mark.emulate
def test_more_sums_later():
    g = graphs.new(device="emulator", io_data_type=data_type.FLOAT)
    x, y = (g.tensor([ROWS, COLUMNS], name=name) for name in "xy")
    n = g.rmsnorm(x, None, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    sums = [g.reduction(g.mul(n, g.tanh(g.mul(n, t))), mode=reduction_mode.ADD).set_dim([ROWS, 1]) for t in (x, y)]
    g.mul(g.add(n, sums[0]), sums[1]).set_output().set_name("out")
    g.reduction(n, mode=reduction_mode.ADD).set_output().set_name("total").set_dim([1, COLUMNS])
    g.build([heur_mode.OPENSOURCE])
    given = {name: torch.randn(ROWS, COLUMNS, generator=graphs.generator("cpu", k)) for k, name in enumerate("xy")}
    made = {"out": torch.empty(ROWS, COLUMNS), "total": torch.empty(1, COLUMNS)}
    g.execute(given | made, torch.empty(g.get_workspace_size(), dtype=torch.uint8))
    assert [type(part.knobs).__name__ for part in g._planner.at(0).parts] == ["PersistentKnobs"]
    x, y = (given[name].double() for name in "xy")
    n = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    first, second = ((n * torch.tanh(n * t)).sum(1, keepdim=True) for t in (x, y))
    torch.testing.assert_close(made["out"].double(), (n + first) * second, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(made["total"].double(), n.sum(0, keepdim=True), rtol=1e-5, atol=1e-5)
