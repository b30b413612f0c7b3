"""The explanation names patterns, nodes, engines, reasons, the choice and its notes."""

import pytest

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase
from support import graphs, toys
from support.graphs import Norm


def test_before_and_after_each_step():
    g = Norm().graph()
    g.validate()
    g.build_operation_graph()
    assert "rows matches rmsnorm.0, swish.0" in g.explain() and "plans (0)" in g.explain()
    g.create_execution_plans([heur_mode.A])
    text = g.explain()
    assert "rows declines rmsnorm.0, swish.0: needs a CUDA device or the emulator; got cpu" in text
    assert "reference can run rmsnorm.0, swish.0" in text and "available" in text
    g.build_plans()
    text = g.explain()
    assert "selected" in text and "chosen" in text
    assert all(note in text for note in g.get_numerical_notes_at_index(0))


def test_nodes_that_nothing_matches_and_plans_that_are_barred():
    g = graphs.new("mixed")
    g.transpose(g.relu(g.tensor([2, 4]), name="one"), [1, 0], name="two").set_output()
    g.validate()
    g.build_operation_graph(patterns=toys.solo("relu"), engines=[toys.HostSolo("toy", (1, 2))])
    g.create_execution_plans([heur_mode.A])
    g.deselect_engines(["toy"])
    text = g.explain()
    assert "no pattern matches two" in text
    assert text.count("barred: engine 'toy' is deselected") == 2


def test_patterns_whose_facts_say_no():
    g = graphs.new()
    x, w = g.tensor([3, 4, 8], [64, 16, 1], name="x"), g.tensor([1, 4, 8])
    g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
    g.build([heur_mode.A])
    assert "rows fits rmsnorm.0, but tensor 'x'" in g.explain()


def test_it_explains_a_graph_that_cannot_run():
    g = Norm().graph()
    with pytest.raises(GraphNotSupportedError):
        g.build([heur_mode.OPENSOURCE])
    text = g.explain()
    assert "mode OPENSOURCE" in text and "needs a CUDA device" in text and "plans (0)" in text
    assert "nothing takes node 'rmsnorm.0' (rmsnorm), node 'swish.0' (swish)" in text
