"""What ``differentiate`` keeps, draws and leaves alone."""

import pytest
import torch

from graphfuse import (
    Differentiated,
    data_type,
    differentiate,
    norm_forward_phase,
    pygraph,
    reduction_mode,
)
from support import differentiated, graphs
from support.differentiated import normed
from support.graphs import BF16, E4M3, FLOAT, HALF

DOUBLE = data_type.DOUBLE
INFERENCE = norm_forward_phase.INFERENCE


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
