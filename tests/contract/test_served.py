"""Planning declines for an engine what it did not declare."""

import re

import pytest
import torch

from graphfuse import PluginError, data_type, engines, heur_mode, tensor_reordering
from graphfuse.contract.match import Pattern
from graphfuse.contract.served import EVERYTHING, Served
from graphfuse.op_graph.freeze import COMPUTE_TYPES
from graphfuse.op_graph.ir import Subgraph
from graphfuse.op_graph.lower import lower
from support import attention_options, graphs, toys

BF16, DOUBLE, FLOAT = data_type.BFLOAT16, data_type.DOUBLE, data_type.FLOAT


def two(a, b, between=None, **graph):
    """relu(a + b), whole."""
    g = graphs.new(**graph)
    total = g.add(a(g), b(g))
    if between:
        between(total)
    g.relu(total).set_output().set_name("out")
    return g


def whole(g) -> Subgraph:
    g.validate()
    graph = lower(g._ir)
    return Subgraph(graph, tuple(range(len(graph.nodes))))


def row_major(g):
    return g.tensor([4, 6])


def column_major(g):
    return g.tensor([4, 6], [1, 4], name="column major")


PLAIN = {
    "row-major": (row_major, row_major),
    "broadcast": (row_major, lambda g: g.tensor([1, 6])),
    "extents of one": (lambda g: g.tensor([1, 6, 1], [1, 1, 9]), lambda g: g.tensor([1, 6, 1])),
    "empty": (lambda g: g.tensor([0, 6], [1, 1]), lambda g: g.tensor([0, 6])),
}


@pytest.mark.parametrize("operands", PLAIN.values(), ids=PLAIN)
def test_the_plain_case_is_served_by_default(operands):
    assert Served().why_not(whole(two(*operands))) is None


DECLARED = {"intermediate_data_type": BF16, "intermediate_rounding": "declared"}
BEYOND = {
    "column-major": ("layouts", lambda: two(row_major, column_major), "'column major'.* stride .6, 1."),
    "gaps": ("layouts", lambda: two(row_major, lambda g: g.tensor([4, 6], [8, 1])), "stride .8, 1.*not row-major"),
    "a broadcast axis": ("layouts", lambda: two(row_major, lambda g: g.tensor([4, 6], [0, 1])), "not row-major"),
    "a constant": ("by_value", lambda: two(row_major, lambda g: 0.5), "is passed by value"),
    "a number": ("by_value", lambda: two(row_major, lambda g: g.tensor([1, 1], is_pass_by_value=True)), "by value"),
    "DOUBLE": ("compute", lambda: two(row_major, row_major, compute_data_type=DOUBLE), "'add.0'.* computes in DOUBLE"),
    "declared rounding": ("rounding", lambda: two(row_major, row_major, **DECLARED), "rounded to BFLOAT16 before"),
    "an output that is read": (
        "rounding",
        lambda: two(row_major, row_major, lambda t: t.set_output().set_data_type(BF16)),
        "rounded to BFLOAT16 before another node reads it; accepted: kept in FLOAT",
    ),
}


@pytest.mark.parametrize(("field", "graph", "message"), BEYOND.values(), ids=BEYOND)
def test_what_goes_beyond_is_declined_unless_it_is_declared(field, graph, message):
    subgraph = whole(graph())
    narrow = Served().why_not(subgraph)
    assert re.search(f"{message}.*`serves.{field}`", narrow)
    wide = EVERYTHING.compute if field == "compute" else True
    assert Served(**{field: wide}).why_not(subgraph) is None
    assert EVERYTHING.why_not(subgraph) is None


def test_reordered_memory_is_another_layout():
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([128, 64]), block_size=16)
    y.set_output(), scale.set_output().set_name("scale").set_reordering_type(tensor_reordering.F8_128x4)
    subgraph = whole(g)
    assert "'scale'" in Served().why_not(subgraph) and Served(layouts=True).why_not(subgraph) is None


def test_ragged_offsets():
    g = graphs.new()
    attention_options.drawn(g, "ragged", 4, back=False)
    declared = {"rounding": True, "layouts": True, "by_value": True}
    why = Served(**declared).why_not(whole(g))
    assert re.search("'q' .*has batches at ragged offsets; accepted: where stride says .*`serves.ragged`", why)
    assert Served(**declared, ragged=True).why_not(whole(g)) is None


def test_what_a_type_holds_that_nobody_inside_reads_is_no_rounding():
    g = graphs.new(intermediate_data_type=BF16, intermediate_rounding="declared")
    g.relu(row_major(g)).set_output().set_data_type(BF16)
    assert Served().why_not(whole(g)) is None


def test_first_party_engines_declare_all_they_do():
    rows, *libraries, reference = engines.ALL
    assert [e.name for e in engines.ALL] == ["rows", "cudnn", "torch", "reference"]
    assert reference.serves == EVERYTHING and EVERYTHING.compute == set(COMPUTE_TYPES)
    for engine in (rows, *libraries):
        ragged = engine.name == "torch"
        assert engine.serves == Served(frozenset({FLOAT}), rounding=True, layouts=True, by_value=True, ragged=ragged)


class Narrow(toys.HostSolo):
    serves = Served()

    def why_not(self, facts, device):
        assert Served().why_not(facts.subgraph) is None, "asked about what it does not declare"
        return None


def both(g):
    total = g.add(g.capture("a"), g.capture("b"))
    return {"out": g.relu(total), "total": total}


@pytest.mark.parametrize("graph", [graph for _, graph, _ in BEYOND.values()], ids=BEYOND)
def test_an_engine_is_not_asked_about_what_it_does_not_declare(graph):
    g = graph()
    g.validate()
    pattern = Pattern("both", both, toys.facts)
    g.build_operation_graph(patterns=[pattern], engines=[Narrow("narrow")])
    g.create_execution_plans([heur_mode.A])
    assert g.get_plan_name_at_index(0) == "reference"
    assert "narrow declines add.0, relu.0: " in g.explain()


def test_the_plain_case_runs():
    g = two(lambda g: g.tensor([4, 6], name="a"), lambda g: g.tensor([4, 6], name="b"))
    a, b, out = torch.randn(4, 6), torch.randn(4, 6), torch.empty(4, 6)
    pattern = Pattern("both", both, toys.facts)
    g.build([heur_mode.OPENSOURCE], patterns=[pattern], engines=[Narrow("narrow")])
    g.execute({"a": a, "b": b, "out": out})
    assert torch.equal(out, (a + b).relu())


def test_another_declaration_is_refused():
    class Wrong(toys.HostSolo):
        serves = {"layouts": True}

    g = two(row_major, row_major)
    g.validate()
    with pytest.raises(PluginError, match="engine 'wrong', .*its serves is .*; accepted: Served"):
        g.build_operation_graph(engines=[Wrong("wrong")])
