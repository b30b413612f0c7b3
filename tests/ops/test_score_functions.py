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
        (
            lambda graph, scores: 3.0,
            GraphTypeError,
            "score_mod must return a tensor of the graph it is given, got 3.0",
        ),
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
    with pytest.raises(
        GraphNotSupportedError, match=f"{option} is given with score_mod; instead: nodes that the function builds"
    ):
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


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_operands_that_nodes_make_and_a_scale_in_memory(rank):
    q, k, v, _ = inputs(2, torch.float32)
    g = graphs.new()
    given, scale = [g.tensor_like(t) for t in (q, k, v)], g.tensor([1] * rank)
    read = [g.mul(t, 2.0) for t in given]
    o, _ = g.sdpa(*read, attn_scale=scale, generate_stats=False, score_mod=capped)
    o.set_output(True)
    out = torch.empty(BATCH, HEADS, ROWS, LAST)
    pack = dict(zip(given, (q, k, v), strict=True)) | {o: out, scale: torch.full([1] * rank, SCALE)}
    graphs.run(g, pack)
    want, _ = exact(2 * q, 2 * k, 2 * v, FUNCTIONS["capped"][1])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_a_scale_of_another_rank_that_is_passed_by_value():
    g = graphs.new()
    q = g.tensor([1, 1, 4, 4])
    with pytest.raises(GraphNotSupportedError, match="attn_scale has dim .1, 1.; accepted: a number, or a tensor of"):
        g.sdpa(q, q, q, g.tensor_like(torch.tensor([[SCALE]])), generate_stats=False, score_mod=capped)


@pytest.mark.parametrize(
    "dims, said",
    [
        (([2, 4, 5, 8], [1, 4, 7, 8], [1, 4, 7, 8]), "q, k and v must have one batch"),
        (([2, 4, 5, 8], [2, 3, 7, 8], [2, 3, 7, 8]), "k has 3 heads, which must divide the 4 of q"),
        (([2, 4, 5, 8], [4, 7, 8], [2, 4, 7, 8]), "must be \\[batch, heads, rows, columns\\]"),
        (([2, 4, 5, 8], [2, 0, 7, 8], [2, 4, 7, 8]), "k has 0 heads"),
    ],
)
def test_shapes_are_those_of_attention(dims, said):
    g = graphs.new()
    q, k, v = (g.tensor(dim) for dim in dims)
    with pytest.raises(GraphValidationError, match=f"node 'sdpa.0' \\(sdpa\\): .*{said}"):
        g.sdpa(q=q, k=k, v=v, generate_stats=False, score_mod=unchanged)
    with pytest.raises(GraphValidationError, match="one is the opposite of the other"):
        same = g.tensor([1, 1, 4, 4])
        g.sdpa(q=same, k=same, v=same, generate_stats=True, is_inference=True, score_mod=unchanged)


def test_a_row_that_sees_nothing_is_zero():
    q, k, v, loss = inputs(HEADS, torch.float32)
    bias = torch.zeros(1, 1, ROWS, OTHERS)
    bias[:, :, 3] = -torch.inf
    made = {}
    for name, function in (("plain", {}), ("drawn", {"score_mod": unchanged})):
        g = graphs.new()
        read = {"q": q, "k": k, "v": v, "bias": bias}
        given = {port: g.tensor_like(t) for port, t in read.items()}
        o, stats = g.sdpa(**given, attn_scale=SCALE, generate_stats=True, **function)
        out, sums = torch.empty(BATCH, HEADS, ROWS, LAST), torch.empty(BATCH, HEADS, ROWS, 1)
        o.set_output(True)
        stats.set_output(True)
        graphs.run(g, {given[port]: t for port, t in read.items()} | {o: out, stats: sums})
        read |= {"o": out, "dO": loss, "stats": sums}
        g = graphs.new()
        given = {port: g.tensor_like(t) for port, t in read.items()}
        function = function and function | {"score_mod_bprop": unchanged}
        grads = g.sdpa_backward(**given, attn_scale=SCALE, **function)
        buffers = [torch.empty_like(t) for t in (q, k, v)]
        for t in grads:
            t.set_output(True)
        graphs.run(g, {given[port]: t for port, t in read.items()} | dict(zip(grads, buffers, strict=True)))
        made[name] = [out, sums, *buffers]
    assert (made["plain"][0][:, :, 3] == 0).all() and (made["plain"][1][:, :, 3] == -torch.inf).all()
    for plain, drawn_ in zip(made["plain"], made["drawn"], strict=True):
        torch.testing.assert_close(drawn_, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_what_nobody_reads_is_left_out(wanted):
    g = graphs.new()
    ports = {n: g.tensor([1, 1, 8, 8], name=n) for n in ("q", "k", "v", "o", "dO")} | {"stats": g.tensor([1, 1, 8, 1])}
    made = g.sdpa_backward(**ports, score_mod=unchanged, score_mod_bprop=unchanged)
    made[wanted].set_output(True)
    g.validate()
    assert [t.name for t in g.frozen.outputs] == [made[wanted].get_name()]
    assert len(g.frozen.nodes) < len(g.nodes)
    read, printed = pygraph.from_json(g.to_json()), {}
    exec(str(g), printed)
    for again in (read, printed["graph"]):
        again.validate()
        assert again.key() == g.key()
    o, stats = g.sdpa(*(ports[n] for n in "qkv"), generate_stats=True, score_mod=unchanged)
    stats.set_output(True)
    g.validate()
    assert len(g.frozen.outputs) == 2 and o.get_is_virtual()


def test_gradients_lie_as_what_they_are_of():
    g = graphs.new()
    stride = [160, 8, 32, 1]  # of [batch, rows, heads, columns]
    ports = {n: g.tensor([2, 4, 5, 8], stride, name=n) for n in ("q", "k", "v", "o", "dO")}
    ports["stats"] = g.tensor([2, 4, 5, 1])
    for functions in ({}, {"score_mod": unchanged, "score_mod_bprop": unchanged}):
        made = g.sdpa_backward(**ports, **functions)
        for t in made:
            t.set_output(True)
        g.validate()
        assert [t.get_stride() for t in made] == [stride] * 3


def test_a_failed_function_leaves_uids_and_tensors_as_they_were():
    g = graphs.new()
    q, largest = g.tensor([1, 1, 4, 4], name="q"), g.tensor([1, 1, 4, 1], name="largest")
    fails = [True]

    def function(graph, scores):
        own = graph.tensor([1, 1, 1, 1], uid=55)
        graph.sdpa(q, q, q, generate_stats=False, score_max=largest)
        if fails[0]:
            raise KeyError("mine")
        return graph.mul(scores, own)

    with pytest.raises(KeyError):
        g.sdpa(q=q, k=q, v=q, generate_stats=False, score_mod=function)
    assert [t.get_name() for t in g.tensors] == ["q", "largest"] and not g.nodes
    fails[0] = False
    g.sdpa(q=q, k=q, v=q, generate_stats=False, score_mod=function)
    assert g.find_tensor(55) is not None


def test_backward_is_products_and_kernels_between_them():
    g = pygraph(io_data_type=BF16, sm_version=90)
    ports = {n: g.tensor([BATCH, HEADS, 256, 64], name=n) for n in ("q", "k", "v", "o", "dO")}
    ports["stats"] = g.tensor([BATCH, HEADS, 256, 1], data_type=FLOAT)
    for t in g.sdpa_backward(**ports, attn_scale=SCALE, score_mod=unchanged, score_mod_bprop=unchanged):
        t.set_output(True)
    engines = [region.engine for region in planned(g).explanation().regions]
    assert set(engines) == {"torch", "rows"} and engines.count("torch") == 5


def test_results_of_a_named_node_have_its_names():
    g = graphs.new()
    ports = {n: g.tensor([1, 1, 8, 8], name=n) for n in ("q", "k", "v", "o", "dO")} | {"stats": g.tensor([1, 1, 8, 1])}
    made = g.sdpa(*(ports[n] for n in "qkv"), generate_stats=True, score_mod=unchanged, name="att")
    made += g.sdpa_backward(**ports, score_mod=unchanged, score_mod_bprop=unchanged, name="back")
    assert [t.get_name() for t in made] == ["att::O", "att::Stats", "back::dQ", "back::dK", "back::dV"]
