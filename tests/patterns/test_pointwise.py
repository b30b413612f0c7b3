"""Nodes that reduce nothing: which are taken together, and their kernels."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse import GraphNotSupportedError, heur_mode
from graphfuse.base.device import for_arch
from graphfuse.patterns import pointwise
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from support import graphs
from support.graphs import BF16, FLOAT
from support.products import lowered, product


def regions(g) -> list[list[str]]:
    """Names of the nodes of each region, largest first."""
    found, declined = plan.matches(lowered(g), plugins.registry(patterns=["pointwise"]))
    assert not declined
    return [[n.name for n in r.subgraph.nodes] for r in found]


def test_all_that_is_pointwise_and_nothing_else():
    g = graphs.new()
    y = g.bias(product(g), g.tensor([1, 4]), name="bias")
    y = g.add(g.gelu(y, name="gelu"), g.relu(g.tensor([8, 4]), name="of the other"), name="sum")
    g.softmax(y, name="softmax").set_output()
    assert regions(g) == [["bias", "gelu", "of the other", "sum"]]


def test_each_reader_of_a_product():
    g = graphs.new()
    y = product(g)
    g.relu(y, name="one").set_output()
    g.softmax(g.gelu(y, name="two"), name="softmax").set_output()
    assert regions(g) == [["one", "two"], ["one"], ["two"]]


def test_nothing_that_is_reduced():
    g = graphs.new()
    g.relu(g.softmax(g.relu(g.tensor([8, 4]))), name="relu").set_output()
    product(g).set_output()
    assert regions(g) == [["relu.0"], ["relu"]]


def test_what_reads_the_same_and_slices_of_it():
    g = graphs.new()
    x, y = g.tensor([8, 16]), g.tensor([8, 8])
    first, second = (g.slice(x, [slice(None), slice(n, n + 8)], name=f"from {n}") for n in (0, 8))
    g.mul(g.swish(first, name="swish"), second, name="mul").set_output()
    g.relu(y, name="one").set_output()
    g.tanh(y, name="other").set_output()
    assert regions(g) == [["from 0", "from 8", "swish", "mul"], ["swish", "mul"], ["one", "other"], ["one"], ["other"]]


def test_each_node_where_a_product_stands_between():
    """Around the first and the second node there is no room for the third, nor around the third for the first."""
    g = graphs.new()
    x = g.relu(g.tensor([8, 8]), name="first")
    second, between = g.gelu(x, name="second"), g.matmul(x, g.tensor([8, 8]))
    g.add(second, between, name="third").set_output()
    assert {frozenset(found) for found in regions(g)} >= {
        frozenset({"first", "second"}),
        frozenset({"second", "third"}),
    }


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B])
def test_behind_a_matrix_product(mode):
    a, b, bias = torch.randn(3, 8, 16), torch.randn(3, 16, 40), torch.randn(1, 1, 40)
    g = graphs.new(device="emulator")
    y = g.matmul(g.tensor_like(a).set_name("a"), g.tensor_like(b).set_name("b"))
    g.gelu(g.bias(y, g.tensor_like(bias).set_name("bias"))).set_output().set_name("out").set_data_type(BF16)
    out = torch.empty(3, 8, 40, dtype=torch.bfloat16)
    graphs.run(g, {"a": a, "b": b, "bias": bias, "out": out}, [mode])
    assert "reference + rows[" in g.get_plan_name_at_index(0)
    exact = F.gelu(a.double() @ b.double() + bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("last", [True, False])
def test_behind_a_convolution_rows_run_where_elements_touch(last):
    x, w, bias = torch.randn(2, 4, 6, 5), torch.randn(16, 4, 3, 3), torch.randn(1, 16, 1, 1)
    exact = F.silu(F.conv2d(x.double(), w.double(), bias.double().flatten()))
    order = torch.channels_last if last else torch.contiguous_format
    out = torch.empty_like(exact, dtype=torch.float32).contiguous(memory_format=order)
    g = graphs.new(device="emulator")
    y = g.conv_fprop(g.tensor_like(x).set_name("x"), g.tensor_like(w).set_name("w"))
    y.set_dim(list(out.shape)).set_stride(list(out.stride()))
    y = g.swish(g.bias(y, g.tensor_like(bias).set_name("bias")))
    y.set_output().set_name("out").set_data_type(FLOAT).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graphs.run(g, {"x": x, "w": w, "bias": bias, "out": out}, [heur_mode.A])
    (region,) = [r for r in g._planner.regions if r.pattern == "pointwise"]
    assert region.facts.columns == (16 if last else 3)
    assert "rows[" in g.get_plan_name_at_index(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_it_is_the_last_choice_of_our_own():
    """A norm takes the nodes before it: its region saves as much and has more nodes."""
    g = graphs.new()
    y = g.bias(product(g), g.tensor([1, 4]), name="bias")
    g.softmax(g.relu(y, name="relu"), name="softmax").set_output()
    low, known = lowered(g), plugins.registry()
    found, _ = plan.matches(low, known)
    best = plan.propose(low, found, known.engines, for_arch("sm_90a"), heur_mode.A).plans[0]
    names = [[n.name for n in part.region.subgraph.nodes] for part in best.parts]
    assert names == [["product"], ["bias", "relu", "softmax"]]


@pytest.mark.parametrize("shape", [(3, 4, 1, 1), (3, 1, 1, 40), (1, 1, 1, 40)], ids=str)
def test_pointwise_nodes_alone_where_a_graph_is_planned_with_them(shape):
    x, a = torch.randn(3, 4, 5, 40), torch.randn(shape)
    g = graphs.new(device="emulator")
    first, second = (g.tensor_like(t).set_name(name) for t, name in ((x, "x"), (a, "a")))
    g.swish(g.add(second, g.mul(first, second))).set_output().set_name("out").set_data_type(BF16)
    out = torch.empty(3, 4, 5, 40, dtype=torch.bfloat16)
    g.build([heur_mode.OPENSOURCE], patterns=[pointwise.PATTERN])
    g.execute({"x": x, "a": a, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert len(g._planner.plans[0].parts) == 1
    torch.testing.assert_close(out.double(), F.silu(x.double() * a + a), rtol=2**-8, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_rows_without_columns_are_left_to_the_reference():
    g = graphs.new(device="emulator")
    out = g.relu(g.tensor([1, 0], name="x")).set_output().set_name("out")
    with pytest.raises(GraphNotSupportedError, match="rows have no columns; accepted: one or more"):
        g.build([heur_mode.OPENSOURCE])
    g.build([heur_mode.A])
    g.execute({"x": torch.empty(1, 0), "out": torch.empty(out.get_dim())})
