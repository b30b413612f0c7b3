"""The order in which cuDNN's engine tells what is added to a convolution: other nodes, the same values."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import data_type
from graphfuse.engines.cudnn.terms import ordered
from graphfuse.op_graph.ir import Subgraph
from support import graphs

SHAPE = [2, 3, 4, 4]
KINDS = {"bias": [1, 3, 1, 1], "residual": SHAPE, "pixel": [1, 1, 4, 4], "number": [1, 1, 1, 1]}


def convolution(names, swapped=(), stored=(), compute=data_type.FLOAT) -> tuple[object, Subgraph]:
    """A convolution, and behind it an addition for each name of KINDS, or another op. swapped, stored: the places of
    additions whose first operand is the term, and of results that are outputs."""
    g = graphs.new()
    y = g.conv_fprop(g.tensor([2, 4, 4, 4], name="x"), g.tensor([3, 4, 3, 3], name="w"), padding=[1, 1], name="conv")
    for n, name in enumerate(names):
        if name in KINDS:
            operands = (y, g.tensor(KINDS[name], name=f"{name}{n}"))
            y = g.add(*(reversed(operands) if n in swapped else operands), name=f"add{n}", compute_data_type=compute)
        else:
            y = getattr(g, name)(*([y, y] if name == "add" else [y]), name=f"{name}{n}")
        if n in stored:
            y.set_output()
    y.set_output().set_name("out")
    g.validate()
    return g, Subgraph(g._ir, tuple(range(len(g._ir.nodes))))


def told(facts) -> list[str]:
    """The nodes after the convolution, with what they read."""
    names = facts.graph.tensors
    return [f"{node.name}({', '.join(names[t].name for _, t in node.inputs)})" for node in ordered(facts)[1:]]


def values(facts, nodes) -> dict[int, torch.Tensor]:
    """Every tensor in float64, by the op table's references."""
    made = {
        t: torch.randn(facts.graph.tensors[t].dim, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        for t in facts.inputs
    }
    for node in nodes:
        outputs = node.op.reference(torch, {port: made[t] for port, t in node.inputs}, dict(node.attributes))
        made |= {t: outputs[port] for port, t in node.outputs}
    return made


def test_what_has_the_convolutions_shape_comes_first_and_the_sum_is_the_first_operand():
    _, facts = convolution(["bias", "residual", "relu"], swapped={0})
    assert told(facts) == [
        "add0(conv::Y, residual1)",
        "add1(add0::OUT_0, bias0)",
        "relu2(add1::OUT_0)",
    ]
    _, facts = convolution(["residual", "bias"], swapped={1})
    assert told(facts) == ["add0(conv::Y, residual0)", "add1(add0::OUT_0, bias1)"]


def test_terms_do_not_cross_what_is_stored_or_is_no_addition():
    for names, stored in ((["bias", "relu", "residual"], ()), (["bias", "residual"], {0}), (["bias", "add"], ())):
        _, facts = convolution(names, stored=stored)
        assert ordered(facts) == facts.nodes


def test_terms_that_are_larger_than_the_convolution_stay():
    g = graphs.new()
    y = g.conv_fprop(g.tensor([1, 4, 4, 4], name="x"), g.tensor([3, 4, 3, 3], name="w"), padding=[1, 1])
    y = g.add(g.add(y, g.tensor([2, 3, 4, 4], name="samples")), g.tensor([1, 3, 4, 4], name="residual"))
    y.set_output()
    g.validate()
    facts = Subgraph(g._ir, tuple(range(len(g._ir.nodes))))
    assert ordered(facts) == facts.nodes


def test_additions_in_another_type_and_after_other_products_stay():
    _, facts = convolution(["bias", "residual"], compute=data_type.DOUBLE)
    assert ordered(facts) == facts.nodes
    g = graphs.new()
    y = g.add(g.matmul(g.tensor([4, 8]), g.tensor([8, 4])), g.tensor([1, 4]))
    g.add(y, g.tensor([4, 4])).set_output()
    g.validate()
    facts = Subgraph(g._ir, (0, 1, 2))
    assert ordered(facts) == facts.nodes


def test_what_another_node_reads_is_no_step_of_a_sum():
    g, facts = convolution(["bias", "residual"])
    assert [n.name for n in ordered(Subgraph(facts.graph, (0, 1)))] == ["conv", "add0"]
    assert ordered(Subgraph(facts.graph, (0, 1))) == facts.nodes[:2]


@given(data=st.data())
def test_the_same_values(data):
    names = data.draw(st.lists(st.sampled_from([*KINDS, "relu", "add"]), max_size=6))
    places = st.sets(st.integers(0, 5))
    _, facts = convolution(names, data.draw(places), data.draw(places))
    nodes = ordered(facts)
    assert [(n.name, n.outputs) for n in nodes] == [(n.name, n.outputs) for n in facts.nodes]
    one, other = values(facts, facts.nodes), values(facts, nodes)
    for t in facts.outputs:
        torch.testing.assert_close(one[t], other[t], rtol=1e-12, atol=1e-12)
