"""Products by torch's kernels, on CPU tensors: on which views they are called, with what behind them, and what is
declined."""

import dataclasses
import re

import pytest
import torch

from graphfuse.engines.torch_calls import engine as calls
from graphfuse.patterns import epilogues
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from support.graphs import BF16, E4M3, FLOAT, HALF
from support.products import lowered
from support.torch_calls import BATCHES, TORCH, Drawn, exactly, hold, product, values


@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("batch", BATCHES)
def test_products_of_batches(batch, dtype):
    case = Drawn()
    y, axes = product(case, batch, dtype)
    exact = exactly(case)
    case.write(y, torch.empty(exact.shape, dtype=TORCH[dtype]), dtype=dtype)
    assert len(calls.torch_call(case.facts()).views[0].dim) == 2 + axes
    hold(case.run(), exact, dtype)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 3, 2)])
def test_products_of_any_layout(order):
    """Axes of A, B and C in memory in this order."""
    back = [order.index(axis) for axis in range(4)]

    def lying(t):
        return t.permute(order).contiguous().permute(back)

    case = Drawn()
    a, b = lying(values(2, 3, 8, 16)), lying(values(2, 3, 16, 6, seed=1))
    y = case.g.matmul(case.read(a, "a"), case.read(b, "b"))
    exact = exactly(case)
    case.write(y, lying(torch.empty(exact.shape, dtype=torch.bfloat16)))
    hold(case.run(), exact)


@pytest.mark.parametrize("turned", ["a", "b", "ab"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_operands_that_nodes_transpose_are_read_where_they_lie(turned, bias, shape):
    case, operands = Drawn(), []
    bias = bias and not shape
    for seed, (name, rows, columns) in enumerate((("a", 8, 16), ("b", 16, 6))):
        data = values(*shape, rows, columns, seed=seed)
        t = case.read(data.mT.contiguous() if name in turned else data, name)
        last = len(shape), len(shape) + 1
        order = [*range(len(shape)), *(last[::-1] if name in turned else last)]
        operands.append(case.g.transpose(t, permutation=order).set_data_type(BF16) if name in turned else t)
    y = case.g.matmul(*operands)
    a, b = (case.pack[name].mT if name in turned else case.pack[name] for name in "ab")
    exact = a.double() @ b.double()
    if bias:
        y = case.g.bias(y, case.read(values(1, 6, seed=2), "bias"))
        exact = exact + case.pack["bias"].double()
    case.write(y, torch.empty(exact.shape, dtype=torch.bfloat16))
    (region, *_), _ = regions(case)
    assert len(region.subgraph.nodes) == len(turned) + 1 + bias
    assert {seen.tensor for seen in calls.torch_call(region.subgraph).views[:2]} <= {*region.subgraph.inputs}
    hold(case.run(), exact)


@pytest.mark.parametrize(
    "dim, first, second",
    [
        ((3, 3, 8, 8), (1, 0, 2, 3), (0, 1, 2, 3)),
        ((6, 6, 6), (0, 1, 2), (1, 2, 0)),
        ((6, 6, 6), (1, 0, 2), (2, 1, 0)),
        ((1, 4, 8, 5), (0, 1, 2, 3), (1, 0, 3, 2)),
        ((3, 8, 8), (0, 2, 1), (0, 2, 1)),
    ],
)
def test_both_operands_are_one_tensor_seen_in_two_ways(dim, first, second):
    case = Drawn()
    x = case.read(values(*dim), "x")
    plain = tuple(range(len(dim)))
    operands = [
        x if order == plain else case.g.transpose(x, permutation=order).set_data_type(BF16) for order in (first, second)
    ]
    y = case.g.matmul(*operands)
    exact = case.pack["x"].double().permute(first) @ case.pack["x"].double().permute(second)
    case.write(y, torch.empty(exact.shape, dtype=torch.bfloat16))
    assert len(regions(case)[0][0].subgraph.nodes) == 1 + sum(order != plain for order in (first, second))
    hold(case.run(), exact)


def regions(case):
    """Regions of products in a graph."""
    known = plugins.installed()
    return plan.matches(lowered(case.g), dataclasses.replace(known, patterns=(epilogues.PATTERN,)))


@pytest.mark.parametrize("why", ["read twice", "another type", "an output"])
def test_a_transpose_that_others_need_is_none_of_the_product(why):
    case = Drawn()
    a, b = case.read(values(8, 16), "a"), case.read(values(6, 16, seed=1), "b")
    turned = case.g.transpose(b, permutation=[1, 0]).set_data_type(FLOAT if why == "another type" else BF16)
    y = case.g.matmul(a, turned)
    if why == "read twice":
        case.write(case.g.identity(turned), torch.empty(16, 6, dtype=torch.bfloat16), "more")
    if why == "an output":
        case.write(turned, torch.empty(16, 6, dtype=torch.bfloat16), "more")
    case.write(y, torch.empty(8, 6, dtype=torch.bfloat16))
    found, _ = regions(case)
    assert {len(region.subgraph.nodes) for region in found} == {1}


def test_rows_and_columns_with_gaps_and_offsets():
    case = Drawn()
    whole_a, whole_b = values(9, 40).bfloat16(), values(20, 33).bfloat16()
    whole = torch.full((9, 50), 7.0, dtype=torch.bfloat16)
    y = case.g.matmul(case.read(whole_a[1:, 8:24], "a"), case.read(whole_b[2:18, ::2], "b"))
    case.write(y, whole[1:, 16:33])
    hold(case.run(), exactly(case))
    assert (whole[:1] == 7).all() and (whole[:, :16] == 7).all() and (whole[:, 33:] == 7).all()


@pytest.mark.parametrize("rows,inner", [(0, 16), (8, 0)])
def test_products_without_rows_or_terms(rows, inner):
    case = Drawn()
    a, b = values(rows, inner), values(inner, 6)
    y = case.g.matmul(case.read(a, "a"), case.read(b, "b"))
    case.write(y, torch.empty(rows, 6, dtype=torch.bfloat16))
    assert torch.equal(case.run(), torch.zeros(rows, 6, dtype=torch.bfloat16))


def test_a_float32_product_is_rounded_once():
    case = Drawn()
    y, _ = product(case, "none", FLOAT)
    case.write(y, torch.empty(8, 6, dtype=torch.bfloat16))
    got = case.run()
    assert torch.equal(got, (case.pack["a"] @ case.pack["b"]).bfloat16())


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("batch", ["none", "weights"])
def test_a_bias_and_a_relu_in_the_same_call(batch, relu):
    case = Drawn()
    y, _ = product(case, batch)
    exact = exactly(case)
    bias = values(6, seed=2).view(*[1] * (exact.dim() - 1), 6)
    y = case.g.bias(y, case.read(bias, "bias"), name="bias")
    exact = exact + case.pack["bias"].double()
    if relu:
        y, exact = case.g.relu(y, name="relu"), exact.relu()
    case.write(y, torch.empty(exact.shape, dtype=torch.bfloat16))
    hold(case.run(), exact)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (lambda g, y, bias: g.gelu(g.bias(y, bias, name="bias"), name="last"), "'last' .gelu. is behind node 'bias'"),
        (lambda g, y, bias: g.gelu(y, name="last"), "'last' .gelu. is behind node 'product'"),
        (lambda g, y, bias: g.relu(g.bias(y, bias), upper_clip=6.0, name="last"), "without slope and clips"),
        (lambda g, y, bias: g.add(y, y), "adds the product to itself"),
        (lambda g, y, bias: g.add(y, g.tensor([8, 6], data_type=BF16, name="x"), name="last"), "'x' .* is no bias"),
        (lambda g, y, bias: g.add(y, 2.0), "is passed by value"),
        (lambda g, y, bias: g.bias(y.set_output().set_data_type(BF16), bias), "is read by others, too"),
        (lambda g, y, bias: g.bias(y, g.tensor([1, 6], data_type=FLOAT, name="x")), "'x' .* is not of BFLOAT16"),
    ],
)
def test_other_epilogues_are_declined(after, why):
    case = Drawn()
    y, _ = product(case, "none")
    bias = case.read(values(1, 6), "bias")
    case.write(after(case.g, y, bias), torch.empty(8, 6, dtype=torch.bfloat16))
    assert re.search(why, case.declined()), case.declined()


def test_types_that_are_declined():
    case = Drawn()
    a, b = case.g.tensor([8, 16], data_type=BF16, name="a"), case.g.tensor([16, 6], data_type=HALF, name="b")
    case.g.matmul(a, b).set_output()
    assert "'b' (HALF" in case.declined() and "accepted: one type" in case.declined()
    case = Drawn()
    case.g.matmul(*(case.g.tensor([16, 16], data_type=E4M3, name=n) for n in "ab")).set_output()
    assert "accepted: BFLOAT16, HALF, FLOAT" in case.declined()
