"""Products, convolutions and attention among norms and pointwise nodes: every mode, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase
from support import dense, graphs, oracle, whole
from support.graphs import BF16, FLOAT

MODES = [heur_mode.A, heur_mode.B]


@settings(max_examples=60)
@given(graph=whole.drawn(), mode=st.sampled_from([*MODES, heur_mode.FALLBACK]))
def test_any_graph(graph, mode):
    graphs.check_drawn(graph, [mode])


@pytest.mark.emulate
@settings(max_examples=12)
@given(graph=whole.drawn(), mode=st.sampled_from(MODES))
def test_any_graph_with_kernels(graph, mode):
    """The reference engine has the products, kernels the rows of norms."""
    graphs.check_drawn(graph, [mode], "emulator")


@given(graph=whole.drawn())
def test_every_product_is_the_reference_engines(graph):
    """And every norm a kernel's, whatever is around it."""
    g = graph.build(device="emulator")
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    takes = {n.op_name: part.engine.name for part in g._planner.at(0).parts for n in part.region.subgraph.nodes}
    assert {takes.get(name, "reference") for name in ("matmul", "conv_fprop", "sdpa")} == {"reference"}
    assert {takes.get(name, "rows") for name in ("rmsnorm", "layernorm", "softmax")} == {"rows"}
    assert not any(
        node.op_name in ("matmul", "conv_fprop", "sdpa")
        for r in g._planner.regions
        for node in r.subgraph.nodes
        if r.pattern != "epilogue"
    )


@given(graph=whole.drawn(), data=st.data())
def test_nodes_in_any_order_are_one_computation(graph, data):
    one, other = graph.build(), graph.build(data.draw(graphs.reorderings(graph)), prefix="other")
    one.validate(), other.validate()
    assert one.key() == other.key()


@given(graph=whole.drawn())
def test_a_graph_prints_as_python(graph):
    g, scope = graph.build(), {}
    exec(str(g), scope)  # noqa: S102 - the point of the test
    g.validate(), scope["graph"].validate()
    assert str(scope["graph"]) != "" and scope["graph"].key() == g.key()


def silu_norm(g, x, weight):
    return g.swish(g.rmsnorm(x, weight, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)[0])


def residual_block(device):
    """Of a video autoencoder: twice norm, SiLU and a convolution with bias, plus the input; all channels last."""
    g = graphs.new(device=device, io_data_type=BF16)
    dim, last = [1, 8, 2, 3, 4], [192, 1, 96, 32, 8]
    x = g.tensor(dim, last, name="x")
    norms = [g.tensor([1, 8, 1, 1, 1], name=f"norm{i}") for i in "12"]
    weights = [g.tensor([8, 8, 3, 3, 3], [216, 1, 72, 24, 8], name=f"weight{i}") for i in "12"]
    biases = [g.tensor([1, 8, 1, 1, 1], name=f"bias{i}") for i in "12"]
    y = x
    for norm, weight, bias in zip(norms, weights, biases, strict=True):
        y = g.conv_fprop(silu_norm(g, y, norm), weight, padding=[1, 1, 1])
        y = g.bias(y, bias)
    g.add(y, x).set_output().set_name("out")
    return g


@pytest.mark.emulate
@pytest.mark.parametrize("mode", MODES)
def test_a_residual_block_of_a_video_autoencoder(mode):
    source = graphs.generator("cpu", 0)

    def values(*shape, scale=1.0):
        channels_last = torch.randn(shape[0], *shape[2:], shape[1], generator=source) * scale
        return channels_last.bfloat16().movedim(-1, 1)

    pack = {"x": values(1, 8, 2, 3, 4)}
    for i in "12":
        pack |= {f"norm{i}": values(1, 8, 1, 1, 1), f"bias{i}": values(1, 8, 1, 1, 1)}
        pack[f"weight{i}"] = values(8, 8, 3, 3, 3, scale=0.07)
    out = torch.empty_like(pack["x"])
    g = residual_block("emulator")
    graphs.run(g, pack | {"out": out}, [mode])
    exact = pack["x"].double()
    for i in "12":
        exact = oracle.swish(oracle.rmsnorm(exact, pack[f"norm{i}"], 1e-6, axes=1)[0])
        ones = (1, 1, 1)
        exact = torch.from_numpy(dense.convolution(exact, pack[f"weight{i}"].double(), ones, ones, ones, ones))
        exact = exact + pack[f"bias{i}"].double()
    exact = exact + pack["x"].double()
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()
    assert [part.engine.name for part in g._planner.at(0).parts] == ["rows", "reference", "rows", "reference", "rows"]
    told = g.explain()
    assert "rows[" in told and "torch declines conv_fprop.0" in told


def test_kernels_alone_do_not_cover_a_product():
    g = residual_block("emulator")
    with pytest.raises(GraphNotSupportedError, match=r"no engine of mode OPENSOURCE takes .*'conv_fprop.0'"):
        g.build([heur_mode.OPENSOURCE])


def test_epilogue_of_a_product_in_fp32_and_rounded_once():
    """Bias, activation, a factor and a residual on a bfloat16 product: rounded at the end alone."""
    g = graphs.new(io_data_type=BF16, intermediate_data_type=BF16)
    source = graphs.generator("cpu", 1)
    a, b = (torch.randn(s, generator=source).bfloat16() for s in ((2, 5, 64), (1, 64, 6)))
    bias, residual = (torch.randn(s, generator=source).bfloat16() for s in ((1, 1, 6), (2, 5, 6)))
    pack = {"a": a, "b": b, "bias": bias, "residual": residual}
    A, B, C, R = (g.tensor_like(t, name=name) for name, t in pack.items())
    y = g.relu(g.bias(g.matmul(A, B), C), negative_slope=0.125)
    g.add(g.scale(y, 0.5), R).set_output().set_name("out").set_data_type(FLOAT)
    out = torch.empty(2, 5, 6)
    graphs.run(g, pack | {"out": out})
    exact = torch.from_numpy(dense.matmul(a.double(), b.double())) + bias.double()
    exact = torch.where(exact > 0, exact, exact * 0.125) * 0.5 + residual.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
