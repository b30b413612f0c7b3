"""What ``differentiate`` keeps, draws and leaves alone, and what it refuses."""

import itertools

import pytest
import torch

from graphfuse import (
    Differentiated,
    GraphNotSupportedError,
    GraphTypeError,
    GraphValidationError,
    data_type,
    differentiate,
    norm_forward_phase,
    pygraph,
    reduction_mode,
)
from support import differentiated, graphs
from support.graphs import BF16, E4M3, FLOAT, HALF

DOUBLE = data_type.DOUBLE
INFERENCE = norm_forward_phase.INFERENCE


def normed(**types) -> tuple[pygraph, dict]:
    """A norm with SiLU and a gate behind it; what is on the way is virtual."""
    g = graphs.new(**types)
    x, gate = (g.tensor([4, 8], name=name) for name in ("x", "gate"))
    w = g.tensor([1, 8], name="w")
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=INFERENCE)
    out = g.mul(g.swish(y), gate).set_output().set_name("out")
    return g, {"x": x, "gate": gate, "w": w, "y": y, "out": out}


def ops(graph: pygraph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def written(graph: pygraph) -> dict:
    made = {t for node in graph.nodes for t in node.outputs.values()}
    return {t.get_name(): t for t in graph.tensors if t in made and not t.get_is_virtual()}


def read(graph: pygraph) -> dict:
    made = {t for node in graph.nodes for t in node.outputs.values()}
    return {t.get_name(): t for t in graph.tensors if t not in made and t.value is None}


# What is kept


def test_inputs_and_one_value_a_row_are_kept():
    g, _ = normed()
    made = differentiate(g, ["out"], ["x", "w", "gate"])
    assert set(made.kept) == {"x", "w", "gate", "rmsnorm.0::INV_VARIANCE"}
    assert ops(made.forward) == ["rmsnorm", "swish", "mul"]
    assert set(written(made.forward)) == {"out", "rmsnorm.0::INV_VARIANCE"}
    assert made.forward.nodes[0].attributes["norm_forward_phase"] is norm_forward_phase.TRAINING
    assert set(written(made.backward)) == {"dx", "dw", "dgate"}
    assert set(read(made.backward)) == {*made.kept, "dout"}


def test_what_is_kept_is_the_same_tensor_in_both_graphs():
    """Name, shape, strides and type; gradients have those of their tensors."""
    g = graphs.new(io_data_type=BF16, intermediate_data_type=BF16)
    x = g.tensor([4, 8], [1, 4], name="x")
    w = g.tensor([1, 8], name="w", data_type=FLOAT)
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=INFERENCE)
    total = g.reduction(g.exp(y), mode=reduction_mode.ADD).set_dim([4, 1])
    g.div(g.exp(y), total).set_output().set_name("out").set_data_type(HALF)
    made = differentiate(g, ["out"], ["x", "w"])
    assert {"x", "w", "rmsnorm.0::INV_VARIANCE", "reduction.0::OUT_0"} <= set(made.kept)
    forward = {t.get_name(): t for t in made.forward.tensors}
    for name, t in read(made.backward).items():
        if name in made.kept:
            assert looks(t) == looks(forward[name]), name
    assert forward["reduction.0::OUT_0"].get_data_type() is FLOAT
    for name, grad in made.gradients.items():
        assert grad.get_name() == f"d{name}" and looks(grad) == looks(forward[name])
    assert looks(made.given["out"]) == looks(forward["out"]) and made.given["out"].get_name() == "dout"


def looks(t):
    return t.get_dim(), t.get_stride(), t.get_data_type(), t.get_byte_alignment()


@pytest.mark.parametrize("dtype", [FLOAT, BF16, E4M3], ids=lambda d: d.name)
def test_outputs_are_kept_in_place_of_what_they_are_made_of(dtype):
    """But those of 8 bits never, and none if all that it is made of is read anyway."""
    g = graphs.new()
    x, y = g.tensor([4, 8], name="x"), g.tensor([4, 8], name="y")
    total = g.add(g.exp(x), g.exp(y)).set_output().set_name("total").set_data_type(dtype)
    g.tanh(total).set_output().set_name("out").set_data_type(FLOAT)
    seen = set(differentiate(g, ["out"], ["total"] if dtype is not E4M3 else ["x"]).kept)
    assert seen == ({"x", "y"} if dtype is E4M3 else {"total"})
    assert set(differentiate(g, ["out"], ["x", "y"]).kept) == {"x", "y"}


@pytest.mark.parametrize("dtype", [FLOAT, BF16, E4M3], ids=lambda d: d.name)
def test_reduced_outputs_are_kept_as_stored(dtype):
    g = graphs.new()
    x = g.tensor([4, 8], name="x")
    total = g.reduction(g.exp(x), mode=reduction_mode.ADD).set_dim([4, 1]).set_output().set_name("total")
    g.log(total.set_data_type(dtype)).set_output().set_name("out").set_data_type(FLOAT)
    made = differentiate(g, ["out"], ["x"])
    assert set(made.kept) == {"x", *(["total"] if dtype is not E4M3 else [])}
    assert dtype is E4M3 or read(made.backward)["total"].get_data_type() is dtype
    (out,) = differentiated.function(made)(given := torch.zeros(4, 8, requires_grad=True))
    out.sum().backward()
    torch.testing.assert_close(given.grad, torch.full((4, 8), 1 / 8))


def test_products_are_kept_and_never_computed_again():
    g = graphs.new()
    a, b = g.tensor([4, 8], name="a"), g.tensor([8, 3], name="b")
    c = g.matmul(a, b, name="product")
    g.gelu(c).set_output().set_name("out")
    made = differentiate(g, ["out"], ["a", "b"])
    assert set(made.kept) == {"a", "b", "product::C"} and ops(made.backward).count("matmul") == 2
    c.set_output()
    assert set(differentiate(g, ["out"], ["a", "b"]).kept) == {"a", "b", "product::C"}


def test_slices_and_chosen_rows_are_read_where_they_are():
    g = differentiated.new()
    x, table = g.tensor([4, 8], name="x"), g.tensor([6, 4], name="table")
    rows = g.tensor([4, 1], data_type=data_type.INT64, name="rows")
    left, right = (g.slice(x, slices=(slice(None), part)) for part in (slice(0, 4), slice(4, 8)))
    g.mul(g.mul(g.swish(left), right), g.gather_rows(table, rows)).set_output().set_name("out")
    made = differentiate(g, ["out"], ["x", "table"])
    assert set(made.kept) == {"x", "table", "rows"}
    values = {"x": (4, 8), "table": (6, 4)}
    drawn = {name: torch.randn(shape, dtype=torch.float64) for name, shape in values.items()}
    differentiated.checked(made, drawn | {"rows": torch.tensor([[0], [5], [2], [0]])})


def test_a_second_derivative_has_what_is_kept_as_an_input():
    g = differentiated.new()
    x = g.tensor([4, 8], name="x")
    length = g.reduction(g.mul(x, x), mode=reduction_mode.ADD).set_dim([4, 1])
    g.mul(x, length).set_output().set_name("out")
    first = differentiate(g, ["out"], ["x"])
    (kept,) = set(first.kept) - {"x"}
    second, of_kept = differentiate(first.backward, ["dx"], ["x", kept]), differentiate(first.forward, [kept], ["x"])
    value, grad, direction = (torch.randn(4, 8, dtype=torch.float64) for _ in range(3))
    known = {"x": value, "dout": grad, "ddx": direction, kept: (value * value).sum(-1, keepdim=True)}
    known |= differentiated.built(second.forward)(known)
    found = differentiated.built(second.backward)(known)
    whole = differentiated.built(of_kept.backward)({"x": value, f"d{kept}": found[f"d{kept}"]})["dx"] + found["dx"]
    leaf = value.clone().requires_grad_()
    (once,) = torch.autograd.grad(leaf * (leaf * leaf).sum(-1, keepdim=True), leaf, grad, create_graph=True)
    (twice,) = torch.autograd.grad(once, leaf, direction)
    torch.testing.assert_close(whole, twice)


def test_what_is_repeated_before_it_is_summed_counts_as_often():
    """The sum's gradient is the same along what was repeated."""
    g = differentiated.new()
    x = g.tensor([1, 3, 2], name="x")
    wide = g.neg(g.expand(x).set_dim([4, 3, 2]))
    g.reduction(wide, mode=reduction_mode.ADD).set_dim([1, 3, 1]).set_output().set_name("y").set_data_type(DOUBLE)
    differentiated.checked(differentiate(g, ["y"], ["x"]), {"x": torch.randn(1, 3, 2).double()})


def test_attention_between_a_norm_and_a_product():
    """Attention's backward reads what it is made of in the type of its result, as kernels take it."""
    g = graphs.new(io_data_type=BF16, intermediate_data_type=FLOAT)
    dims = {"q": (2, 4, 9, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 8), "w": (1, 1, 8, 8)}
    q, k, v, w = (g.tensor([*dim], name=name) for name, dim in dims.items())
    normal, _ = g.rmsnorm(q, None, 1e-5, norm_forward_phase=INFERENCE)
    o, _ = g.sdpa(normal.set_data_type(BF16), k, v, attn_scale=8**-0.5, use_causal_mask=True, is_inference=True)
    g.matmul(o.set_data_type(BF16), w).set_output().set_name("y")
    made = differentiate(g, ["y"], [*dims])
    assert set(made.kept) == {*dims, "rmsnorm.0::INV_VARIANCE", "sdpa.0::O", "sdpa.0::Stats"}
    (node,) = (node for node in made.backward.nodes if node.op.name == "sdpa_backward")
    assert {node.inputs[port].get_data_type() for port in ("q", "k", "v", "o", "dO")} == {BF16}
    source = graphs.generator("cpu", 3)
    given = [torch.randn(dim, generator=source).bfloat16().requires_grad_() for dim in dims.values()]
    loss = torch.randn(2, 4, 9, 8, generator=source)
    found = torch.autograd.grad(differentiated.function(made)(*given), given, loss.bfloat16())
    wide = [t.detach().float().requires_grad_() for t in given]
    rows = torch.nn.functional.rms_norm(wide[0], (8,), eps=1e-5)
    heads = [t.repeat_interleave(2, 1) for t in wide[1:3]]
    y = torch.nn.functional.scaled_dot_product_attention(rows, *heads, is_causal=True) @ wide[3]
    for grad, want in zip(found, torch.autograd.grad(y, wide, loss.bfloat16().float()), strict=True):
        torch.testing.assert_close(grad.float(), want, rtol=0.02, atol=0.02 * want.abs().max().item())


def test_kept_is_read_in_place_of_being_computed_again():
    g, t = normed()
    for chosen in ("rmsnorm.0::Y", t["y"]):
        made = differentiate(g, ["out"], ["x", "gate"], kept=[chosen])
        assert "rmsnorm.0::Y" in made.kept and "rmsnorm.0::Y" in written(made.forward)
        assert len(ops(made.backward)) < len(ops(differentiate(g, ["out"], ["x", "gate"]).backward))


def test_nothing_is_drawn_that_was_not_asked_for():
    g, _ = normed()
    made = differentiate(g, ["out"], ["gate"])
    assert set(written(made.backward)) == {"dgate"} and "rmsnorm_backward" not in ops(made.backward)
    assert made.gradients.keys() == {"gate"} and "gate" not in made.kept
    x_alone = differentiate(g, ["out"], ["x"])
    assert set(written(x_alone.backward)) == {"dx"}
    assert "reduction" not in ops(differentiate(g, ["out"], ["x"]).backward)


def test_an_output_that_does_not_change_has_no_gradient_to_give():
    g, t = normed()
    g.exp(t["gate"]).set_output().set_name("other")
    made = differentiate(g, ["out", "other"], ["x"])
    assert set(made.given) == {"out"} and set(read(made.backward)) == {*made.kept, "dout"}


# The user's graph, constants, types


def test_the_graph_stays_as_it_is():
    g, _ = normed()
    g.validate()
    before, key, nodes = str(g), g.key(), list(g.nodes)
    made = differentiate(g, ["out"], ["x", "w"], kept=["rmsnorm.0::Y"])
    assert (str(g), g.key(), g.nodes) == (before, key, nodes)
    assert made.forward is not g and not set(made.forward.tensors) & set(g.tensors)
    assert {t.get_name(): t.get_uid() for t in g.tensors}.items() <= {
        t.get_name(): t.get_uid() for t in made.forward.tensors
    }.items()


def test_constants_are_constants_and_scalars_are_given_to_both():
    g = graphs.new()
    x = g.tensor([4, 8], name="x")
    epsilon, factor = (g.tensor([1, 1], name=n, is_pass_by_value=True) for n in ("epsilon", "factor"))
    y, _ = g.rmsnorm(x, None, epsilon, norm_forward_phase=INFERENCE)
    g.mul(g.mul(y, factor), 0.5).set_output().set_name("out")
    made = differentiate(g, ["out"], ["x"])
    assert "factor" in made.kept and read(made.backward)["factor"].get_is_pass_by_value()
    assert not read(made.backward).keys() & {"epsilon"}
    values = {"epsilon": 1e-3, "factor": 1.5}
    given = torch.randn(4, 8, requires_grad=True)
    (out,) = differentiated.function(made, values)(given)
    wide = given.detach().double().requires_grad_()
    want = torch.nn.functional.rms_norm(wide, (8,), eps=1e-3) * 0.75
    torch.testing.assert_close(out.double(), want)
    out.sum().backward(), want.sum().backward()
    torch.testing.assert_close(given.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounding", ["float32", "declared"])
@pytest.mark.parametrize("compute", [FLOAT, DOUBLE], ids=lambda d: d.name)
def test_backward_computes_in_the_types_of_forward(compute, rounding):
    """And rounds nothing on the way: with "declared", gradients are those of the rounded values that forward reads."""
    g, t = normed(compute_data_type=compute, intermediate_data_type=BF16, intermediate_rounding=rounding)
    made = differentiate(g, ["out"], ["x", "w", "gate"])
    assert {node.compute for node in made.backward.nodes} == {compute}
    assert {x.dtype for x in made.backward.frozen.tensors if x.virtual} <= {compute}
    values = [torch.randn(t[n].get_dim(), generator=graphs.generator("cpu", 1)) for n in made.gradients]
    given = [v.clone().requires_grad_() for v in values]
    (out,) = differentiated.function(made)(*given)
    x, w, gate = (v.double().requires_grad_() for v in values)
    want = torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (8,), eps=1e-5) * w) * gate
    close = 2e-2 if rounding == "declared" else 1e-5
    torch.testing.assert_close(out.double(), want, rtol=close, atol=close)
    out.sum().backward(), want.sum().backward()
    for one, other in zip(given, (x, w, gate), strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


def test_nodes_of_two_compute_types():
    g = graphs.new()
    x = g.tensor([4, 8], name="x")
    y = g.exp(x, compute_data_type=DOUBLE)
    g.mul(y, y, compute_data_type=FLOAT).set_output().set_name("out")
    made = differentiate(g, ["out"], ["x"])
    assert {node.compute for node in made.backward.nodes} == {FLOAT, DOUBLE}


def test_one_gradient_of_two_types_is_rounded_for_each():
    g = graphs.new(io_data_type=BF16)
    x, y = g.tensor([4, 8], name="x"), g.tensor([4, 8], name="y", data_type=FLOAT)
    g.mul(g.add(x, y), 1 / 3).set_output().set_name("out").set_data_type(FLOAT)
    given = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    (out,) = differentiated.function(differentiate(g, ["out"], ["x", "y"]))(*given)
    out.sum().backward()
    assert given[0].grad[0, 0] == torch.tensor(1 / 3).bfloat16() and given[1].grad[0, 0] == torch.tensor(1 / 3)


def test_tensors_on_the_way_and_outputs_that_are_read():
    g = differentiated.new()
    x = g.tensor([2, 3], name="x")
    y = g.exp(x).set_output().set_name("y")
    z = g.mul(y, g.sqrt(y)).set_output().set_name("z")
    made = differentiate(g, [z], [y])
    run, kept = differentiated.built(made.backward), torch.rand(2, 3, dtype=torch.float64) + 0.5
    found = run({"y": kept, "dz": torch.ones(2, 3, dtype=torch.float64)})["dy"]
    torch.testing.assert_close(found, 1.5 * kept.sqrt())
    values = {"x": torch.randn(2, 3, dtype=torch.float64)}
    differentiated.checked(differentiate(g, [y, z], [x]), values)


def test_a_long_chain_of_values_that_are_used_twice():
    g = graphs.new()
    y = g.tensor([4, 8], name="x")
    for _ in range(60):
        y = g.mul(y, y)
    g.exp(y).set_output().set_name("out")
    made = differentiate(g, ["out"], ["x"])
    assert set(made.kept) == {"x"} and len(made.backward.nodes) < 6 * 60


def test_names_do_as_well_as_tensors():
    g, t = normed()
    one, other = differentiate(g, ["out"], ["x"]), differentiate(g, (t["out"],), [t["x"], "x"])
    assert isinstance(one, Differentiated) and str(one.backward) == str(other.backward)


# What is refused


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
