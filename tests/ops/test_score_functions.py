"""Attention with a function of its scores: nodes in the place of one, and nothing left where that fails."""

import pytest
import torch

from graphfuse import (
    GraphfuseError,
    GraphNotSupportedError,
    GraphTypeError,
    GraphValidationError,
    data_type,
    heur_mode,
    pygraph,
)
from support import graphs

FLOAT, BF16 = data_type.FLOAT, data_type.BFLOAT16
BATCH, HEADS, ROWS, OTHERS, COLUMNS, LAST = 2, 4, 12, 20, 16, 24
SCALE, CAP = 0.3, 2.0


def capped(graph, scores):
    return graph.mul(graph.tanh(graph.mul(scores, 1 / CAP)), CAP)


def causal(graph, scores):
    seen = graph.cmp_ge(graph.gen_index(scores, axis=2), graph.gen_index(scores, axis=3))
    return graph.binary_select(scores, -1e30, seen)


def unchanged(graph, scores):
    return scores


def hidden(scores):
    return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e30)


FUNCTIONS = {"capped": (capped, lambda s: CAP * (s / CAP).tanh()), "causal": (causal, hidden)}


def inputs(heads, dtype):
    source = graphs.generator("cpu", heads)
    shapes = (HEADS, ROWS, COLUMNS), (heads, OTHERS, COLUMNS), (heads, OTHERS, LAST), (HEADS, ROWS, LAST)
    return [torch.randn(BATCH, *shape, generator=source).to(dtype) for shape in shapes]


def exact(q, k, v, function, loss=None):
    """[O, log-sum-exp], or the gradients of q, k and v, in float64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    shared = HEADS // k.shape[1]
    scores = function(q @ k.repeat_interleave(shared, 1).mT * SCALE)
    made = scores.softmax(-1) @ v.repeat_interleave(shared, 1)
    if loss is not None:
        return torch.autograd.grad(made, (q, k, v), loss.double())
    return made.detach(), scores.logsumexp(-1, keepdim=True).detach()


def planned(graph):
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.A, heur_mode.FALLBACK])
    return graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [HEADS, 2, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, heads, dtype):
    ours, theirs = FUNCTIONS[name]
    q, k, v, _ = inputs(heads, dtype)
    g = graphs.new(io_data_type=dtype)
    Q, K, V = (g.tensor_like(t) for t in (q, k, v))
    o, stats = g.sdpa(q=Q, k=K, v=V, attn_scale=SCALE, generate_stats=True, score_mod=ours)
    o.set_output(True)
    stats.set_output(True).set_data_type(FLOAT)
    out, sums = torch.empty(BATCH, HEADS, ROWS, LAST, dtype=dtype), torch.empty(BATCH, HEADS, ROWS, 1)
    graphs.run(g, {Q: q, K: k, V: v, o: out, stats: sums})
    want, want_sums = exact(q, k, v, theirs)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=8 * rounding, atol=8 * rounding)
    torch.testing.assert_close(sums.double(), want_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [HEADS, 2, 1])
def test_gradients(heads, dtype):
    q, k, v, loss = inputs(heads, dtype)
    want, sums = exact(q, k, v, FUNCTIONS["capped"][1])
    g = graphs.new(io_data_type=dtype)
    kept = {}

    def forward(graph, scores):
        kept["tanh"] = graph.tanh(graph.mul(scores, 1 / CAP))
        return graph.mul(kept["tanh"], CAP)

    def backward(graph, grad):
        return graph.mul(grad, graph.sub(1.0, graph.mul(kept["tanh"], kept["tanh"])))

    read = dict(zip(("q", "k", "v", "o", "dO", "stats"), (q, k, v, want.to(dtype), loss, sums.float()), strict=True))
    given = {name: g.tensor_like(t) for name, t in read.items()}
    made = g.sdpa_backward(**given, attn_scale=SCALE, score_mod=forward, score_mod_bprop=backward)
    out = [torch.empty_like(t) for t in (q, k, v)]
    for t in made:
        t.set_output(True)
    graphs.run(g, {given[name]: t for name, t in read.items()} | dict(zip(made, out, strict=True)))
    rounding = torch.finfo(dtype).eps
    for grad, wanted in zip(out, exact(q, k, v, FUNCTIONS["capped"][1], loss), strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=4 * rounding, atol=4 * rounding * wanted.abs().max())


@pytest.mark.parametrize("heads", [HEADS, 1])
def test_products_and_one_kernel_between_them(heads):
    g = pygraph(io_data_type=BF16, sm_version=90)
    q, k, v = (g.tensor([BATCH, n, 256, 64]) for n in (HEADS, heads, heads))
    o, stats = g.sdpa(q=q, k=k, v=v, attn_scale=SCALE, generate_stats=True, score_mod=capped)
    o.set_output(True)
    stats.set_output(True).set_data_type(FLOAT)
    assert [region.engine for region in planned(g).explanation().regions] == ["torch", "rows", "torch"]


def drawn(function, **more):
    g = graphs.new(io_data_type=BF16)
    q, k, v = (g.tensor([BATCH, HEADS, n, COLUMNS], name=name) for name, n in zip("qkv", (8, 16, 16), strict=True))
    return g, lambda: g.sdpa(q=q, k=k, v=v, attn_scale=SCALE, generate_stats=False, score_mod=function, **more)


def of_another(graph, scores):
    return pygraph().tensor([1], name="foreign")


def raises(graph, scores):
    graph.mul(scores, 2.0)
    raise KeyError("mine")


@pytest.mark.parametrize(
    "function, error, said",
    [
        ("square", GraphTypeError, "score_mod must be a function of the graph and a tensor, got 'square'"),
        (lambda graph, scores: None, GraphTypeError, "what score_mod returns must be a tensor"),
        (of_another, GraphValidationError, r"what score_mod returns \('foreign'\) belongs to another graph"),
        (raises, KeyError, "mine"),
        (lambda scores: scores, TypeError, "positional argument"),
    ],
)
def test_what_fails_leaves_nothing(function, error, said):
    g, draw = drawn(function)
    with pytest.raises(error, match=said):
        draw()
    assert [t.get_name() for t in g.tensors] == ["q", "k", "v"] and g.nodes == []
    g, draw = drawn(unchanged)
    draw()[0].set_output(True)
    g.validate()


@pytest.mark.parametrize(
    "option, value", [("use_causal_mask", True), ("diagonal_band_right_bound", 0), ("stats_use_log2", True)]
)
def test_other_options_are_for_the_function(option, value):
    _, draw = drawn(capped, **{option: value})
    with pytest.raises(GraphNotSupportedError, match=f"{option} is given beside score_mod; instead: nodes that the"):
        draw()


def test_both_functions_of_a_backward():
    g = graphs.new(io_data_type=BF16)
    given = {n: g.tensor([1, 1, 8, 8], name=n) for n in ("q", "k", "v", "o", "dO")} | {"stats": g.tensor([1, 1, 8, 1])}
    for name in ("score_mod", "score_mod_bprop"):
        with pytest.raises(GraphfuseError, match=f"{name} is given alone; accepted: score_mod and score_mod_bprop"):
            g.sdpa_backward(**given, **{name: unchanged})


def test_nodes_have_names_of_their_own():
    g, draw = drawn(capped)
    first, second = draw()[0], draw()[0]
    assert first.get_name() != second.get_name()
    assert len({node.name for node in g.nodes}) == len(g.nodes)
