"""matmul against float64 element by element, its shapes, strides and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphNotSupportedError, GraphValidationError, data_type
from graphfuse.ops.layouts import packed_stride
from support import dense, graphs
from support.graphs import BF16, FLOAT, TORCH
from support.operands import TYPES, hold, tensor, values


def multiplied(a, b, types=(FLOAT, FLOAT, FLOAT), **options):
    g = graphs.new()
    c = g.matmul(tensor(g, a, types[0], "a"), tensor(g, b, types[1], "b"), **options)
    c.set_output().set_name("c").set_data_type(types[2])
    g.validate()
    assert c.get_stride() == list(packed_stride(c.get_dim())), "row-major, whatever the inputs"
    out = torch.full(c.get_dim(), 7.0).to(TORCH[types[2]])
    graphs.run(g, {"a": a, "b": b, "c": out})
    return out


@given(
    batch=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["both", "a", "b"])), max_size=3),
    m=st.integers(0, 6),
    k=st.integers(0, 40),
    n=st.integers(0, 6),
    types=st.tuples(*[st.sampled_from(TYPES)] * 3),
    data=st.data(),
)
def test_matmul(batch, m, k, n, types, data):
    shapes = [
        (*(extent if who in ("both", name) else 1 for extent, who in batch), *last)
        for name, last in (("a", (m, k)), ("b", (k, n)))
    ]
    a, b = (
        values(shape, dtype, seed, data.draw(st.permutations(range(len(shape)))))
        for seed, (shape, dtype) in enumerate(zip(shapes, types, strict=False))
    )
    got = multiplied(a, b, types)
    assert got.shape == (*(extent for extent, _ in batch), m, n)
    hold(got, dense.matmul(a.double(), b.double()), k)


def test_matmul_in_double():
    a, b = (torch.randn(5, 5, dtype=torch.float64, generator=graphs.generator("cpu", s)) for s in (0, 1))
    g = graphs.new(io_data_type=data_type.DOUBLE)
    c = g.matmul(g.tensor([5, 5], name="a"), g.tensor([5, 5], name="b"), compute_data_type=data_type.DOUBLE)
    c.set_output().set_name("c")
    out = torch.empty(5, 5, dtype=torch.float64)
    graphs.run(g, {"a": a, "b": b, "c": out})
    np.testing.assert_allclose(out.numpy(), dense.matmul(a, b), rtol=1e-14, atol=1e-14)


def test_sums_are_float32_and_rounded_once():
    """256 + 256 ones: bfloat16 would have stopped at 256, and C's type sees the whole sum."""
    ones = torch.ones(1, 512, dtype=torch.bfloat16)
    assert multiplied(ones, ones.T, (BF16, BF16, BF16)).item() == 512
    g = graphs.new(io_data_type=BF16, intermediate_data_type=BF16)
    c = g.matmul(g.tensor([1, 512], name="a"), g.tensor([512, 1], name="b"))
    g.sub(c, 512.0).set_output().set_name("out").set_data_type(FLOAT)
    a, out = torch.full((1, 512), 1.0078125, dtype=torch.bfloat16), torch.empty(1, 1)
    graphs.run(g, {"a": a, "b": ones.T.contiguous(), "out": out})
    assert out.item() == 4, "a virtual C is not rounded to bfloat16, whose neighbours of 516 are 4 apart"


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([3, 4], [5, 6], r"B must have as many rows as A has columns, 4, got 5 \(A \[3, 4\], B \[5, 6\]\)"),
        ([4], [4], r"A and B must have one rank, 2 or more.*got \[4\] and \[4\]"),
        ([2, 3, 4], [4, 5], r"A and B must have one rank.*got \[2, 3, 4\] and \[4, 5\]"),
        ([2, 3, 4], [3, 4, 5], r"batch axis 0 does not broadcast"),
    ],
)
def test_what_cannot_be_multiplied(a, b, message):
    g = graphs.new()
    g.matmul(g.tensor(a), g.tensor(b), name="m").set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'm' \(matmul\): {message}"):
        g.validate()


def test_padding_of_matmul():
    g = graphs.new()
    a, b = g.tensor([2, 2]), g.tensor([2, 2])
    g.matmul(a, b, FLOAT, padding=0.0).set_output()
    g.validate()
    with pytest.raises(GraphNotSupportedError, match=r"node 'm' \(matmul\): padding is not offered; .* or 0.0"):
        g.matmul(a, b, padding=1.0, name="m")


def test_a_gated_pair_of_products_without_a_type_for_intermediates():
    """As cuDNN's samples draw it: products of transposed weights, SiLU written as nodes, every plan run by index."""
    x, gate, up = (
        torch.randn(1, rows, 16, generator=graphs.generator("cpu", rows + n)).bfloat16()
        for n, rows in enumerate((6, 10, 10))
    )
    handle = graphfuse.create_handle("cpu")
    g = graphfuse.pygraph(handle=handle, compute_data_type=FLOAT)
    tensors = [g.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=BF16) for t in (x, gate.mT, up.mT)]
    X, G, U = tensors
    gated = g.matmul(name="gate", A=X, B=G, compute_data_type=FLOAT)
    gated = g.mul(a=gated, b=g.sigmoid(input=gated))
    out = g.mul(a=gated, b=g.matmul(name="up", A=X, B=U, compute_data_type=FLOAT))
    out.set_output(True).set_data_type(BF16)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphfuse.heur_mode.A, graphfuse.heur_mode.FALLBACK])
    g.check_support()
    g.build_plans(graphfuse.build_plan_policy.ALL)
    exact = torch.nn.functional.silu(x.double() @ gate.double().mT) * (x.double() @ up.double().mT)
    for index in range(g.get_execution_plan_count()):
        made = torch.full(exact.shape, float("nan")).bfloat16()
        size = g.get_workspace_size_plan_at_index(index)
        space = torch.empty(size, dtype=torch.uint8) if size else None
        g.execute_plan_at_index({X: x, G: gate.mT, U: up.mT, out: made}, space, index=index, handle=handle)
        torch.testing.assert_close(made.double(), exact, rtol=2.0**-8, atol=1e-4)
