"""The plug-in as its users meet it: installed, found by name, right on every problem that it takes."""

import graphfuse
from graphfuse import data_type, heur_mode
from graphfuse.plugin import check, listed


def test_it_is_installed():
    found = {p.kind: p.state for p in listed() if p.name == "bias_gelu"}
    assert found == {"pattern": "loaded", "engine": "loaded"}


def test_it_takes_a_graph():
    graph = graphfuse.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    X, BIAS = graph.tensor([30, 64], name="X"), graph.tensor([1, 64], name="BIAS")
    graph.gelu(graph.add(X, BIAS)).set_output()
    graph.build([heur_mode.OPENSOURCE], engines=["bias_gelu", "emulator"])
    assert "bias_gelu" in graph.get_plan_name_at_index(0)


def test_it_is_right():
    """Raises with a report of what is wrong. More problems and kernels: problems=200, programs=20."""
    print(check("bias_gelu", problems=12, programs=2))
