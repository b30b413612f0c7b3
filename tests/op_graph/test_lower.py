"""What lowering makes explicit: NVFP4's implicit block scales."""

import math

import pytest

from graphfuse import GraphNotSupportedError
from graphfuse.op_graph.lower import block_scale_offset, lower
from support import graphs
from support.graphs import E4M3, FLOAT, FP4, Norm


def lowered(g):
    g.validate()
    return lower(g._ir)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 1560, 399360])
def test_offset_is_row_statistics_and_a_counter_each_rounded_to_128(rows):
    assert block_scale_offset(rows) == 128 * math.ceil(4 * rows / 128) + 128


@pytest.mark.parametrize("rows", [1, 33, 1560])
def test_an_fp4_output_gets_row_major_scales_in_the_workspace(rows):
    graph = lowered(Norm(rows, 64, output=FP4).graph())
    quantize = graph.nodes[-1]
    assert [n.op_name for n in graph.nodes] == ["rmsnorm", "swish", "block_scale_quantize"]
    scale, out = (graph.tensors[quantize.output(port)] for port in ("scale", "Y"))
    assert (scale.dim, scale.stride, scale.dtype) == ((rows, 4), (4, 1), E4M3)
    assert scale.workspace == block_scale_offset(rows)
    assert out.name == "out" and not out.virtual
    assert scale not in graph.bound
    values = graph.tensors[quantize.input("input")]
    assert values.virtual and values.dtype is FLOAT
    assert (quantize.attribute("axis"), quantize.attribute("element_type")) == (1, FP4)


@pytest.mark.parametrize(
    ("dim", "stride", "wide"),
    [([6, 32, 1, 1], [32, 1, 1, 1], {0: 2, 1: 1}), ([2, 32, 3, 5], [480, 1, 160, 32], {0: 30, 1: 1, 2: 10, 3: 2})],
)
def test_scales_of_a_channels_last_tensor(dim, stride, wide):
    """One row of scales after the other, in the order of the rows in memory. wide: axis -> stride."""
    g = graphs.new()
    g.swish(g.tensor(dim, stride)).set_output().set_data_type(FP4)
    graph = lowered(g)
    scale = graph.tensors[graph.nodes[-1].output("scale")]
    assert scale.dim == (dim[0], 2, *dim[2:])
    assert {a: scale.stride[a] for a in wide} == wide
    assert scale.workspace == block_scale_offset(math.prod(dim) // 32)


def two_outputs(g):
    for _ in range(2):
        g.relu(g.tensor([4, 32])).set_output().set_data_type(FP4)


def narrow(g):
    g.relu(g.tensor([4, 24])).set_output().set_data_type(FP4)


def read_again(g):
    g.tanh(g.relu(g.tensor([4, 32])).set_output().set_data_type(FP4)).set_output()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_outputs, "relu.0::OUT_0.*relu.1::OUT_0.*block_scale_quantize"),
        (narrow, "multiple of 16"),
        (read_again, "read by another node"),
    ],
)
def test_what_cannot_have_implicit_scales(make, message):
    g = graphs.new()
    make(g)
    with pytest.raises(GraphNotSupportedError, match=message):
        lowered(g)


def test_explicit_scales_leave_the_graph_as_it_is():
    g = Norm(output=FP4, blocks=True).graph()
    graph = lowered(g)
    assert [n.op_name for n in graph.nodes] == ["rmsnorm", "swish", "block_scale_quantize"]
    assert all(t.workspace is None for t in graph.tensors)
