"""What ``differentiate`` refuses, and what its errors say."""

import itertools

import pytest
import torch

from graphfuse import (
    GraphNotSupportedError,
    GraphTypeError,
    GraphValidationError,
    data_type,
    differentiate,
    norm_forward_phase,
    reduction_mode,
)
from support import graphs
from support.differentiated import normed
from support.graphs import E4M3, FLOAT

DOUBLE = data_type.DOUBLE
INFERENCE = norm_forward_phase.INFERENCE


def read_by(op: str, *ports: str, **attributes):
    """Draws a node that reads x as the last of `ports`, and others as the rest."""

    def draw(g, x):
        given = {p: g.tensor([4, 1] if p in ("inv_variance", "epsilon") else [4, 8], name=p) for p in ports[:-1]}
        made = getattr(g, op)(**given, **{ports[-1]: x}, **attributes)
        return made[0] if isinstance(made, list | tuple) else made

    return draw


def _running(g, x):
    weights = [g.tensor([1, 8], name=f"weight{n}") for n in range(4)]
    found = g.batchnorm(x, *weights, epsilon=1e-3, momentum=0.1)
    found[0].set_output()
    return found[3]


def _statistic(g, x):
    y, inverse = g.rmsnorm(g.tensor([4, 8], name="y"), x, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    y.set_output()
    return inverse


def _attention(g, x):
    q, k, v = (g.tensor([1, 2, 4, 8], name=name) for name in "qkv")
    return g.sdpa(q, k, v, bias=x, generate_stats=False)[0]


def _statistics_of_attention(g, x):
    k, v = (g.tensor([1, 2, 4, 8], name=name) for name in "kv")
    o, stats = g.sdpa(x, k, v, generate_stats=True)
    o.set_output()
    return stats


def _beside(g, x):
    g.exp(x).set_output()
    return g.exp(g.tensor([4, 8], name="y"))


def _rotated(g, x):
    return g.rotate_pairs(g.tensor([4, 8], name="input"), x, g.tensor([4, 4], name="sin"))


def _quantized(g, x):
    y, scale = g.block_scale_quantize(x, block_size=32)
    y.set_output().set_data_type(E4M3)
    return g.identity(scale.set_output().set_data_type(data_type.FP8_E8M0))


SECOND = "the gradient of a gradient is not offered"
NONE = r"differentiate: 'x' has no gradient, as none of outputs \('out'\) changes with it"
REFUSED = {
    "epsilon": ([1, 1], read_by("rmsnorm", "input", "epsilon", norm_forward_phase=INFERENCE), "epsilon is a constant"),
    "rmsnorm_backward": ([4, 8], read_by("rmsnorm_backward", "grad", "inv_variance", "input", has_dbias=False), SECOND),
    "softmax_backward": ([4, 8], read_by("softmax_backward", "grad", "output"), SECOND),
    "log_softmax_backward": ([4, 8], read_by("log_softmax_backward", "output", "grad"), SECOND),
    "swish_backward": ([4, 8], read_by("swish_backward", "loss", "input"), SECOND),
    "cos": ([4, 4], _rotated, "cosines and sines of a rotation have no gradient here"),
    "bias": ([1, 2, 4, 4], _attention, "sdpa_backward writes it, into a tensor that it is given"),
    "Stats": ([1, 2, 4, 8], _statistics_of_attention, "sdpa_backward has that of O alone, and of no statistics"),
    "block_scale_quantize": ([4, 32], _quantized, "quantization in blocks has no gradient"),
    "MUL": ([4, 8], lambda g, x: g.reduction(x, mode=reduction_mode.MUL).set_dim([4, 1]), ".*; MUL_NO_ZEROS has one"),
    "running": ([4, 8], _running, "running statistics have no gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reason_names_node_op_port_and_tensor(name):
    dim, draw, reason = REFUSED[name]
    g = graphs.new()
    draw(g, g.tensor(dim, name="x")).set_output().set_name("out").set_data_type(FLOAT)
    (node,) = (n for n in g.nodes if any(t.get_name() == "x" for t in n.inputs.values()))
    (port,) = (port for port, t in node.inputs.items() if t.get_name() == "x")
    told = rf"node '{node.name}' \({node.op.name}\): no gradient of {port} \('x'\): {reason}"
    with pytest.raises(GraphNotSupportedError, match=told):
        differentiate(g, ["out"], ["x"])


NOTHING = {
    "a comparison": (
        lambda g, x: g.cmp_gt(x, 0.0),
        r"; node 'cmp_gt.0' \(cmp_gt\) reads 'x' as input: the result is constant but for jumps$",
    ),
    "nothing reads it on the way": (_beside, "$"),
    "a scale, of a statistic": (_statistic, "$"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_outputs_that_do_not_change(name):
    draw, reason = NOTHING[name]
    g = graphs.new()
    draw(g, g.tensor([1, 8], name="x")).set_output().set_name("out")
    with pytest.raises(GraphNotSupportedError, match=NONE + reason):
        differentiate(g, ["out"], ["x"])


@pytest.mark.parametrize("dtype", [E4M3, data_type.INT32], ids=lambda d: d.name)
def test_outputs_without_a_gradient(dtype):
    g, t = normed()
    t["out"].set_data_type(dtype)
    with pytest.raises(GraphValidationError, match=f"'out' is {dtype.name}; accepted: FLOAT, BFLOAT16, HALF, DOUBLE"):
        differentiate(g, ["out"], ["x"])


def test_what_a_quantized_output_is_made_of_has_gradients():
    g = graphs.new()
    x = g.tensor([4, 32], name="x")
    y = g.exp(x).set_output().set_name("y")
    q, scale = g.block_scale_quantize(y, block_size=32)
    q.set_output().set_name("q").set_data_type(E4M3), scale.set_output().set_name("scale")
    assert set(differentiate(g, ["y"], ["x"]).kept) == {"y"}
    with pytest.raises(GraphValidationError, match="'q' is FP8_E4M3; accepted"):
        differentiate(g, ["q"], ["x"])
    with pytest.raises(GraphValidationError, match="kept has 'q', which is FP8_E4M3"):
        differentiate(g, ["y"], ["x"], kept=["q"])


def test_wrong_arguments():
    g, t = normed()
    theirs, _ = normed()
    for what, position in (("outputs", 0), ("wrt", 1), ("kept", 2)):
        for wrong in (
            "out",
            t["out"],
            None,
            3,
            {"out"},
            [3],
            [[t["out"]]],
            (name for name in ("out",)),
            [torch.ones(9)],
        ):
            arguments = [["out"], ["x"], []]
            arguments[position] = wrong
            with pytest.raises(GraphTypeError, match=f"differentiate: {what} must be a list of tensors or names, got"):
                differentiate(g, *arguments)
        for wrong in ("nobody", theirs.tensors[0]):
            arguments = [["out"], ["x"], []]
            arguments[position] = [wrong]
            with pytest.raises(GraphValidationError, match=f"{what} has .*, which graph 'graph' has not"):
                differentiate(g, *arguments)
    for empty, arguments in (("outputs", ([], ["x"])), ("wrt", (["out"], []))):
        with pytest.raises(GraphTypeError, match=f"differentiate: {empty} is empty; accepted: one tensor or more"):
            differentiate(g, *arguments)
    with pytest.raises(
        GraphTypeError, match=r"wrt must be a list of tensors or names, got a list with a torch.Tensor$"
    ):
        differentiate(g, ["out"], ["x", torch.ones(9)])
    with pytest.raises(GraphValidationError, match=r"wrt has 'X', .* 'graph' has not; it has 'x', .*'out'"):
        differentiate(g, ["out"], ["X"])
    with pytest.raises(GraphValidationError, match="outputs has 'x', which no node of graph 'graph' writes"):
        differentiate(g, ["x"], ["w"])
    with pytest.raises(GraphTypeError, match="graph must be a pygraph, got str"):
        differentiate("g", ["out"], ["x"])
    with pytest.raises(GraphValidationError, match="'out' is in outputs, its gradient given, and in wrt"):
        differentiate(g, ["out"], ["x", "out"])
    with pytest.raises(GraphValidationError, match="graph 'graph' has no nodes"):
        differentiate(graphs.new(), ["out"], ["x"])


def test_scalars_by_value_have_no_gradient():
    g = graphs.new()
    factor = g.tensor([1, 1], name="factor", is_pass_by_value=True)
    g.mul(g.tensor([4, 8], name="x"), factor).set_output().set_name("out")
    with pytest.raises(GraphValidationError, match="'factor' is passed by value; accepted: .*, in memory"):
        differentiate(g, ["out"], ["factor"])


@pytest.mark.parametrize("names", list(itertools.permutations(("x", "dx", "y"), 2)))
def test_names_that_two_tensors_would_have(names):
    g = graphs.new()
    a, b = (g.tensor([4, 8], name=n) for n in names)
    g.mul(a, b).set_output().set_name("out")
    if {"x", "dx"} == set(names):
        with pytest.raises(GraphValidationError, match="two tensors of backward would be called 'dx'.*rename one"):
            differentiate(g, ["out"], [a, b])
    else:
        assert set(differentiate(g, ["out"], [a, b]).gradients) == set(names)


def test_one_name_of_two_tensors():
    g = graphs.new()
    a, b = (g.tensor([4, 8], name="x") for _ in range(2))
    g.add(a, b).set_output().set_name("out")
    with pytest.raises(GraphValidationError, match="wrt has 'x', which graph 'graph' has 2 times; give the tensor"):
        differentiate(g, ["out"], ["x"])
    with pytest.raises(GraphValidationError, match="two tensors of backward would be called 'dx'"):
        differentiate(g, ["out"], [a, b])
    assert set(differentiate(g, ["out"], [b]).gradients) == {"x"}
