"""Which kernels of a plan are launched so that they begin before the one in front of them ends."""

import dataclasses

import pytest

from graphfuse import data_type, heur_mode, norm_forward_phase, pygraph, reduction_mode
from graphfuse.base.device import for_arch
from graphfuse.op_graph.freeze import freeze
from graphfuse.planning import kernels
from graphfuse.planning.planner import Planner
from graphfuse.runtime import device as devices

pytestmark = pytest.mark.emulate


@pytest.fixture
def frozen(monkeypatch):
    """For each frozen part, in order, whether it may begin early."""
    seen, own = [], kernels.prepare

    def prepare(*given):
        made = own(*given)
        return dataclasses.replace(made, freeze=lambda early: seen.append(early) or made.freeze(early))

    monkeypatch.setattr(kernels, "prepare", prepare)
    return seen


def built(*outputs: int) -> Planner:
    """Norms of tensors with other row counts, and the largest of each column of the last, all kernels of their own."""
    graph = pygraph(io_data_type=data_type.FLOAT, handle=None)
    for rows in outputs:
        x = graph.tensor([2, rows, 64])
        y, _ = graph.rmsnorm(x, None, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
        y.set_data_type(data_type.FLOAT).set_output()
    graph.reduction(y, mode=reduction_mode.MAX).set_dim([2, 1, 64]).set_output()
    planner = Planner(freeze(graph), None, (), ["emulator", "rows"])
    planner.create([heur_mode.A])
    planner.build_at(0)
    assert len(planner.plans[0].parts) == len(outputs) + 1
    return planner


@pytest.mark.parametrize("overlaps", [False, True])
def test_all_but_the_first_kernel(frozen, overlaps, monkeypatch):
    monkeypatch.setattr(Planner, "_overlaps", overlaps)
    planner = built(3, 5)
    assert frozen == [False, overlaps, overlaps]
    frozen.clear()
    assert set(planner.executable().starts) == {False, True} and frozen == [True, True, True]


@pytest.mark.parametrize(
    ("arch", "version", "overlaps"), [("sm_90a", 13000, True), ("sm_90a", 12020, False), ("sm_100a", 13000, False)]
)
def test_where_it_was_measured(arch, version, overlaps, monkeypatch):
    monkeypatch.setattr(devices, "driver_version", lambda: version)
    planner = built(3)
    assert not planner._overlaps  # the emulator runs one kernel after another
    planner.device = for_arch(arch)
    assert planner._overlaps == overlaps
