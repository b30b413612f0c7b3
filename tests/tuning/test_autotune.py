"""graph.autotune where nothing can be timed: said before anything happens."""

import pytest

import graphs
import toys
from graphfuse import GraphNotSupportedError, GraphStateError, GraphTypeError, VariantPackError, heur_mode, settings
from graphs import Norm


def planned(device: str = "cpu", modes=(heur_mode.A,)):
    g = Norm().graph(device)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans(list(modes))
    return g, Norm().inputs() | Norm().outputs()


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_without_a_gpu_it_is_refused_and_nothing_is_kept(device):
    g, pack = planned(device)
    before = pack["out"].clone()
    with pytest.raises(GraphNotSupportedError, match=f"planned for {device}.*accepted by autotune: a CUDA device"):
        g.autotune(pack)
    assert (before == pack["out"]).all() and not [*settings.tuning_dir().glob("*")]


@pytest.mark.parametrize("budget", [0, -1.0, "long", None, True, float("nan")])
def test_a_wrong_budget(budget):
    g, pack = planned()
    with pytest.raises(GraphTypeError, match="time_budget must be a number of seconds above 0"):
        g.autotune(pack, time_budget=budget)


def test_before_there_are_plans():
    g = Norm().graph()
    with pytest.raises(GraphStateError, match=r"create_execution_plans\(\) first"):
        g.autotune({})
    g.validate()
    g.build_operation_graph()
    with pytest.raises(GraphStateError, match=r"create_execution_plans\(\) first"):
        g.autotune({})


def test_keys_of_another_graph_are_refused():
    g, pack = planned()
    other = graphs.new().tensor([1])
    with pytest.raises(VariantPackError, match="is not of graph"):
        g.autotune({**pack, other: 1})


def test_a_tunable_engine_needs_a_problem_class():
    """What third-party kernels are until they say more."""
    assert toys.ScratchSolo(0).problem(object()) is None
