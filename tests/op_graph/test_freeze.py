"""What validate infers and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphValidationError, data_type, norm_forward_phase, tensor_reordering
from support import graphs
from support.graphs import BF16, E4M3, E5M2, FLOAT, FP4, HALF

F8_128x4 = tensor_reordering.F8_128x4
INFERENCE = norm_forward_phase.INFERENCE


@pytest.mark.parametrize(
    ("dim", "stride", "want"),
    [
        ([2, 3, 4], [12, 4, 1], [12, 4, 1]),
        ([2, 3, 4], [100, 10, 1], [12, 4, 1]),  # packed, whatever the input's gaps
        ([2, 3, 4, 5], [60, 1, 15, 3], [60, 1, 15, 3]),  # channels last stays
        ([6, 8, 1, 1], [8, 1, 1, 1], [8, 1, 1, 1]),
        ([0, 5], [5, 1], [5, 1]),
        ([1, 64], [64, 1], [64, 1]),
        ([32, 64], [0, 1], [64, 1]),  # broadcast rows do not turn the output around
    ],
)
def test_strides_follow_the_first_input(dim, stride, want):
    g = graphs.new()
    out = g.relu(g.tensor(dim, stride)).set_output()
    g.validate()
    assert (out.get_dim(), out.get_stride()) == (dim, want)


@pytest.mark.parametrize("swapped", [False, True])
def test_strides_follow_the_input_of_the_outputs_shape(swapped):
    g = graphs.new()
    operands = [g.tensor([2, 8, 4, 4], [128, 1, 32, 8]), 1.0]
    out = g.add(*operands[:: -1 if swapped else 1]).set_output()
    g.validate()
    assert out.get_stride() == [128, 1, 32, 8]


@given(st.permutations(range(4)), st.lists(st.integers(2, 5), min_size=4, max_size=4))
def test_inferred_strides_are_packed_in_the_inputs_order(order, dim):
    stride = list(graphfuse.op_graph.ir.packed_stride(dim, order))
    g = graphs.new()
    out = g.relu(g.tensor(dim, stride)).set_output()
    g.validate()
    assert out.get_stride() == stride


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [([2, 3], [2, 3], [2, 3]), ([2, 1], [1, 3], [2, 3]), ([1, 1], [4, 5], [4, 5]), ([0, 3], [1, 1], [0, 3])],
)
def test_shapes_broadcast(a, b, want):
    g = graphs.new()
    out = g.add(g.tensor(a), g.tensor(b)).set_output()
    g.validate()
    assert out.get_dim() == want


def test_data_types_come_from_the_graph():
    g = graphs.new(io_data_type=BF16, intermediate_data_type=FLOAT)
    x = g.tensor([4, 16], name="x")
    middle = g.relu(x)
    q, scale = g.block_scale_quantize(middle, block_size=16)
    q.set_output(), scale.set_output()
    g.validate()
    types = [t.get_data_type() for t in (x, middle, q, scale)]
    assert types == [BF16, FLOAT, FP4, E4M3]


def test_what_a_frozen_node_says_beyond_its_attributes():
    g = graphs.new()
    x = g.tensor([4, 64, 1])
    y, scale = g.block_scale_quantize(x, block_size=32)
    wide, wide_scale = g.block_scale_quantize(x, block_size=32, axis=-2)
    for t in (y, scale, wide.set_data_type(E5M2), wide_scale):
        t.set_output()
    g.reduction(x).set_output().set_dim([4, 1, 1])
    g.validate()
    one, other, reduction = g._ir.nodes
    assert (one.attribute("axis"), one.attribute("element_type")) == (1, E4M3)
    assert (other.attribute("axis"), other.attribute("element_type")) == (1, data_type.FP8_E5M2)
    assert {node.attribute("scale_type") for node in (one, other)} == {data_type.FP8_E8M0}
    assert reduction.attribute("axes") == (1, 2)
    types = [t.get_data_type() for t in (y, scale, wide, wide_scale)]
    assert types == [E4M3, data_type.FP8_E8M0, E5M2, data_type.FP8_E8M0]
    assert scale.get_dim() == [4, 2, 1]


@pytest.mark.parametrize(
    ("rounding", "want"),
    [("float32", [data_type.DOUBLE, FLOAT, BF16]), ("declared", [HALF, BF16, BF16])],
)
def test_what_virtual_tensors_carry(rounding, want):
    g = graphs.new(intermediate_data_type=BF16, intermediate_rounding=rounding)
    wide = g.relu(g.tensor([4]), compute_data_type=data_type.DOUBLE).set_data_type(HALF)
    single = g.relu(wide)
    out = g.tanh(single).set_output().set_data_type(BF16)
    g.validate()
    by_uid = {t.uid: t.dtype for t in g._ir.tensors}
    assert [by_uid[t.get_uid()] for t in (wide, single, out)] == want
    assert (wide.get_data_type(), single.get_data_type()) == (HALF, BF16)


def test_inference_starts_afresh_after_a_change():
    g = graphs.new()
    x = g.tensor([4, 8])
    out = g.relu(x).set_output()
    g.validate()
    x.set_dim([5, 8])
    g.validate()
    assert out.get_dim() == [5, 8]
    x.set_dim([4, 6]).set_stride([6, 1])
    g.validate()
    assert (out.get_dim(), out.get_stride()) == ([4, 6], [6, 1])


def norm(g, x, w, e=1e-5, bias=None, phase=INFERENCE):
    return g.rmsnorm(x, w, e, bias, norm_forward_phase=phase)[0].set_output()


def quantize(g, x, **attributes):
    for t in g.block_scale_quantize(x, **attributes):
        t.set_output()


def two_ranks(g):
    two = g.tensor_scalar(2.0, name="two")
    g.mul(g.tensor([3]), two).set_output()
    g.mul(g.tensor([3, 4]), two).set_output()


def typed(g, port, dtype, block=16):
    y, scale = g.block_scale_quantize(g.tensor([4, 32]), block_size=block)
    y.set_output(), scale.set_output()
    {"Y": y, "scale": scale}[port].set_data_type(dtype)


def reordered(g, port, axis=None):
    made = g.block_scale_quantize(g.tensor([16, 32]), axis=axis)
    for t in made:
        t.set_output()
    return made[port].set_reordering_type(F8_128x4)


def output_all(g):
    for node in g.nodes:
        for t in node.outputs.values():
            t.set_output()


REFUSED = {
    "no nodes": (lambda g: g.tensor([2]), "no nodes"),
    "no output": (lambda g: g.relu(g.tensor([2])), "no output.*set_output"),
    "dead result": (lambda g: (g.relu(g.tensor([2]), name="dead"), g.tanh(g.tensor([2])).set_output()), "node 'dead'"),
    "broadcast": (lambda g: g.add(g.tensor([2, 3]), g.tensor([2, 4])).set_output(), r"add.0.*dimension 1"),
    "rank": (lambda g: g.add(g.tensor([2, 3]), g.tensor([3])).set_output(), r"add.0.*one rank"),
    "output dim": (lambda g: g.relu(g.tensor([2, 3])).set_output().set_dim([3, 2]), r"relu.0.*\[3, 2\].*\[2, 3\]"),
    "scale shape": (lambda g: norm(g, g.tensor([4, 8]), g.tensor([1, 7])), r"rmsnorm.0.*scale.*\[1, 7\]"),
    "scale rank": (
        lambda g: norm(g, g.tensor([4, 8]), g.tensor([1, 1, 8])),
        r"rmsnorm.0.*scale must have the rank of input \[4, 8\], or a lower one for input's last axes.*got \[1, 1, 8\]",
    ),
    "scale of lower rank": (
        lambda g: norm(g, g.tensor([4, 8, 1]), g.tensor([8])),
        r"scale must have the rank.*last axes.*got \[8\]",
    ),
    "bias rank": (
        lambda g: norm(g, g.tensor([4, 8]), g.tensor([8]), bias=g.tensor([1, 1, 8])),
        r"bias must have scale's shape \[1, 8\], leading extents of 1 aside, got \[1, 1, 8\]",
    ),
    "bias shape": (lambda g: norm(g, g.tensor([4, 8]), g.tensor([1, 8]), bias=g.tensor([1, 1])), r"bias.*\[1, 8\]"),
    "epsilon": (
        lambda g: norm(g, g.tensor([4, 8]), g.tensor([1, 8]), g.tensor([1, 8])),
        "epsilon must have one element.*by position: input, scale, epsilon, bias.*cuDNN's order differs: give keywords",
    ),
    "phase": (
        lambda g: norm(g, g.tensor([4, 8]), g.tensor([1, 8]), phase=norm_forward_phase.NOT_SET),
        "NOT_SET.*INFERENCE",
    ),
    "no columns": (lambda g: norm(g, g.tensor([4, 0]), g.tensor([1, 0])), r"no elements"),
    "bias without scale": (
        lambda g: norm(g, g.tensor([4, 8]), None, bias=g.tensor([4, 8])),
        r"bias.*last axis.*\[1, 8\], leading extents of 1 aside, got \[4, 8\]",
    ),
    "no columns without scale": (lambda g: norm(g, g.tensor([4, 0]), None), r"no elements"),
    "block": (lambda g: quantize(g, g.tensor([4, 16]), block_size=8), r"block_size 8.*16, 32"),
    "wide block extent": (lambda g: quantize(g, g.tensor([4, 48]), block_size=32), r"extent 48.*multiple.*32"),
    "reduced dim": (
        lambda g: g.reduction(g.tensor([4, 8])).set_output().set_dim([4, 2]),
        r"reduction.0.*input \[4, 8\].*got \[4, 2\]",
    ),
    "reduced rank": (lambda g: g.reduction(g.tensor([4, 8])).set_output().set_dim([4]), r"rank of input.*got \[4\]"),
    "block extent": (lambda g: quantize(g, g.tensor([4, 24]), block_size=16), r"extent 24.*multiple"),
    "block axis": (lambda g: quantize(g, g.tensor([4, 16]), block_size=16, axis=2), "axis 2"),
    "compute": (lambda g: g.relu(g.tensor([2]), compute_data_type=HALF).set_output(), "HALF.*FLOAT, DOUBLE"),
    "self overlap": (
        lambda g: g.relu(g.tensor([2, 3])).set_output().set_stride([2, 1]),
        "several elements to one address",
    ),
    "virtual overlap": (
        lambda g: g.tanh(g.relu(g.tensor([2, 3])).set_stride([2, 1])).set_output(),
        "several elements to one address",
    ),
    "span": (lambda g: g.relu(g.tensor([3, 4], [2**62, 1])).set_output(), r"spans more than 2\^63"),
    "stride rank": (lambda g: g.relu(g.tensor([2, 3], [1])).set_output(), "one stride per dimension"),
    "by value": (lambda g: g.relu(g.tensor([2], is_pass_by_value=True)).set_output(), "one element, it has 2"),
    "by value output": (lambda g: g.relu(g.tensor([1])).set_output().set_is_pass_by_value(True), "passed by value but"),
    "constant in memory": (
        lambda g: g.mul(g.tensor([2]), g.tensor_scalar(2.0).set_is_pass_by_value(False)).set_output(),
        "has the value 2.0 and must be passed by value",
    ),
    "virtual input": (lambda g: g.relu(g.tensor([2], is_virtual=True)).set_output(), "no node writes it"),
    "fp4 extent": (lambda g: g.relu(g.tensor([2, 3])).set_output().set_data_type(FP4), "two elements a byte"),
    "fp4 stride": (
        lambda g: g.relu(g.tensor([2, 4], [5, 1])).set_output().set_stride([5, 1]).set_data_type(FP4),
        "two elements",
    ),
    "rank 9": (lambda g: g.relu(g.tensor([1] * 9)).set_output(), "1 to 8 dimensions"),
    "scale type": (
        lambda g: typed(g, "scale", data_type.FP8_E5M2),
        "quantize.0'.*scale.*E5M2; accepted: FP8_E4M3, FP8_E8M0$",
    ),
    "scale float": (lambda g: typed(g, "scale", FLOAT), "quantize.0'.*scale.*FLOAT; accepted: FP8_E4M3, FP8_E8M0$"),
    "element type": (lambda g: typed(g, "Y", data_type.INT8), "quantize.0'.*Y.*INT8; accepted: FP4_E2M1$"),
    "reordered input": (
        lambda g: g.relu(g.tensor([4, 4], name="s", reordering_type=F8_128x4)).set_output(),
        "'s'.*is reordered; accepted: scales that block_scale_quantize makes",
    ),
    "reordered result": (
        lambda g: g.relu(g.tensor([4, 4])).set_output().set_reordering_type(F8_128x4),
        "relu.0::OUT_0.*is reordered; accepted: scales",
    ),
    "reordered elements": (lambda g: reordered(g, 0), "Y.*is reordered; accepted: scales"),
    "reordered and virtual": (
        lambda g: g.relu(reordered(g, 1).set_output(False)).set_output(),
        "scale.*is reordered and virtual",
    ),
    "reordered along another axis": (
        lambda g: reordered(g, 1, axis=0),
        r"scale.*F8_128x4.*quantize.0'.*along axis 0; accepted: blocks along the last axis, 1",
    ),
    "declared fp4": (
        lambda g: g.relu(g.relu(g.tensor([2, 3])).set_data_type(FP4)).set_output(),
        "two elements a byte",
        "declared",
    ),
    "wide element type": (
        lambda g: typed(g, "Y", HALF, 32),
        "quantize.0'.*Y.*HALF; accepted: FP8_E4M3, FP8_E5M2, FP4_E2M1$",
    ),
    "wide scale type": (lambda g: typed(g, "scale", E4M3, 32), "scale.*FP8_E4M3; accepted: FP8_E8M0$"),
    "e8m0": (
        lambda g: g.relu(g.tensor([2])).set_output().set_data_type(data_type.FP8_E8M0),
        "relu.0'.*output.*FP8_E8M0; accepted: FLOAT",
    ),
    "constant of two ranks": (two_ranks, "mul.1'.*one rank.*constant 'two'.*one for each rank"),
    "constant and type": (
        lambda g: g.mul(g.tensor([2]), g.tensor_scalar(1e6, name="big").set_data_type(HALF)).set_output(),
        r"'big': 1000000.0 does not fit float16; accepted: -65504.0 to 65504.0",
    ),
    "constant and graph's type": (
        lambda g: g.mul(g.tensor([2]), g.tensor_scalar(2.5).set_data_type(data_type.INT32)).set_output(),
        "2.5 does not fit int32; accepted: integers",
    ),
    "unwritten output": (
        lambda g: (norm(g, g.tensor([2, 4]), g.tensor([1, 4])), output_all(g)),
        "inv_variance is marked as",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, message, rounding = (*case, "float32")[:3]
    g = graphs.new(intermediate_rounding=rounding)
    make(g)
    with pytest.raises(GraphValidationError, match=message):
        g.validate()


def test_a_missing_data_type_names_the_tensor_and_the_remedy():
    g = graphs.new(io_data_type=data_type.NOT_SET)
    x = g.tensor([2], name="x", data_type=FLOAT)
    g.relu(x).set_output().set_name("bare")
    with pytest.raises(GraphValidationError, match="'bare'.*set_data_type.*io_data_type"):
        g.validate()


@pytest.mark.parametrize(
    ("types", "want"),
    [
        ({}, FLOAT),
        ({"io_data_type": data_type.HALF}, data_type.HALF),
        ({"io_data_type": data_type.HALF, "intermediate_data_type": data_type.BFLOAT16}, data_type.BFLOAT16),
    ],
)
def test_intermediates_without_a_type_have_that_of_inputs_and_outputs_else_float(types, want):
    """As with cuDNN's frontend, whose samples leave it out."""
    g = graphfuse.pygraph(**types)
    between = g.relu(g.tensor([2], data_type=data_type.BFLOAT16))
    g.relu(between).set_output().set_data_type(data_type.BFLOAT16)
    g.validate()
    assert between.get_data_type() is want


def test_a_virtual_result_may_declare_any_type():
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.relu(g.tensor([4, 16])).set_data_type(data_type.FP8_E8M0))
    y.set_output(), scale.set_data_type(FLOAT)
    g.relu(scale).set_output()
    g.validate()


def test_an_unused_constant_is_no_mistake():
    g = graphs.new()
    g.tensor_scalar(2.0)
    g.relu(g.tensor([2])).set_output()
    g.validate()
