"""matmul and conv_fprop against float64 element by element, their shapes, strides and errors."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphNotSupportedError, GraphTypeError, GraphValidationError, convolution_mode, data_type
from graphfuse.ops.layouts import packed_stride
from support import dense, graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT, HALF, TORCH

TYPES = [BF16, HALF, FLOAT, E4M3, E5M2]


def values(shape, dtype, seed, order=None):
    """Random values of a type; order: of the axes in memory, outermost first."""
    order = range(len(shape)) if order is None else order
    lying = torch.randn([shape[a] for a in order], generator=graphs.generator("cpu", seed)).to(TORCH[dtype])
    return lying.permute(*np.argsort(order).tolist())


def tensor(g, data, dtype, name):
    return g.tensor(data.shape, data.stride(), dtype, name=name)


def hold(got, exact, terms):
    """got is exact rounded to its type once, give or take float32's error in a sum of so many terms."""
    exact = torch.from_numpy(exact)
    error = (got.double() - exact).abs()
    close = error <= 2e-7 * terms**0.5 * 8 + 1e-6 * exact.abs()
    if got.dtype is not torch.float32:
        close |= oracle.ulps(got, oracle.rounded(exact, got.dtype)) <= 1
    assert close.all(), f"{int((~close).sum())} elements are off, by up to {error.max()}"


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


# Convolutions


def convolved(image, weight, types=(FLOAT, FLOAT, FLOAT), **options):
    g = graphs.new()
    y = g.conv_fprop(tensor(g, image, types[0], "image"), tensor(g, weight, types[1], "weight"), **options)
    y.set_output().set_name("y").set_data_type(types[2])
    g.validate()
    dim = y.get_dim()
    assert y.get_stride() == list(packed_stride(dim, [0, *range(2, len(dim)), 1])), "channels last, whatever the inputs"
    out = torch.full(dim, 7.0).to(TORCH[types[2]]).as_strided(dim, y.get_stride())
    graphs.run(g, {"image": image, "weight": weight, "y": out})
    return out


@st.composite
def windows(draw):
    """Extents, taps, padding, stride and dilation of each spatial axis, the weight within what is padded."""
    found = []
    for _ in range(draw(st.sampled_from([2, 3]))):
        taps, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        least = max(dilation * (taps - 1) + 1 - before - after, 0)
        found.append((draw(st.integers(least, least + 3)), taps, before, after, draw(st.integers(1, 3)), dilation))
    return tuple(zip(*found, strict=True))


@given(
    window=windows(),
    batch=st.integers(0, 2),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    made=st.integers(0, 2),
    types=st.tuples(*[st.sampled_from(TYPES)] * 3),
    turned=st.booleans(),
    data=st.data(),
)
def test_conv(window, batch, groups, per_group, made, types, turned, data):
    extents, taps, before, after, stride, dilation = window
    shapes = (batch, groups * per_group, *extents), (groups * made, per_group, *taps)
    image, weight = (
        values(shape, dtype, seed, data.draw(st.permutations(range(len(shape)))))
        for seed, (shape, dtype) in enumerate(zip(shapes, types, strict=False))
    )
    options = {"pre_padding": list(before), "post_padding": after, "stride": np.array(stride), "dilation": dilation}
    if before == after and data.draw(st.booleans()):
        options = {"padding": before, "stride": stride, "dilation": dilation}
    if turned:
        options["convolution_mode"] = convolution_mode.CONVOLUTION
    got = convolved(image, weight, types, **options)
    exact = dense.convolution(image.double(), weight.double(), before, after, stride, dilation, turned)
    assert got.shape == exact.shape
    hold(got, exact, per_group * math.prod(taps))


def test_a_large_convolution_takes_seconds():
    """A layer of a video autoencoder, three taps along each axis, channels last."""
    image = values((1, 96, 4, 60, 104), BF16, 0, (0, 2, 3, 4, 1))
    weight = values((96, 96, 3, 3, 3), BF16, 1)
    start = time.process_time()
    got = convolved(image, weight, (BF16, BF16, FLOAT), padding=[1, 1, 1])
    assert time.process_time() - start < 60
    corners = itertools.product((0, 3), (0, 59), (0, 103))
    for d, h, w in (*corners, (1, 30, 50)):
        lows = [max(at - 1, 0) for at in (d, h, w)]
        seen = image[:, :, lows[0] : d + 2, lows[1] : h + 2, lows[2] : w + 2].double().numpy()
        taps = [
            slice(low - at + 1, low - at + 1 + n) for low, at, n in zip(lows, (d, h, w), seen.shape[2:], strict=True)
        ]
        exact = np.einsum("ncdhw,kcdhw->nk", seen, weight[(slice(None), slice(None), *taps)].double().numpy())
        np.testing.assert_allclose(got[:, :, d, h, w].double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("image", "weight", "options", "message"),
    [
        ([1, 2, 8], [4, 2, 3], {}, r"image must be \[N, C, H, W\] or \[N, C, D, H, W\] and weight .*got \[1, 2, 8\]"),
        ([1, 2, 8, 8], [4, 2, 3], {}, r"image must be .* and \[4, 2, 3\]"),
        ([1, 3, 8, 8], [4, 2, 3, 3], {}, "image has 3 channels, which must be a multiple of weight's 2"),
        ([1, 4, 8, 8], [3, 2, 3, 3], {}, "weight makes 3 channels, which must be a multiple of the 2 groups"),
        ([1, 0, 8, 8], [3, 2, 3, 3], {}, "weight makes 3 channels, which must be a multiple of the 0 groups"),
        ([1, 2, 8, 2], [4, 2, 3, 3], {}, "weight spans 3 elements along axis 3; accepted: 1 to the 2"),
        ([1, 2, 8, 8], [4, 2, 0, 3], {}, "weight spans 0 elements along axis 2; accepted: 1 to the 8"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"dilation": [4, 1]}, "weight spans 9 elements along axis 2"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"padding": [1]}, r"padding must be 2 integers >= 0.*got \[1\]"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"stride": [1, 0]}, r"stride must be 2 integers >= 1.*got \[1, 0\]"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"padding": [0, -1]}, r"padding must be 2 integers >= 0"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"pre_padding": [0, 0]}, "pre_padding is given without post_padding"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"post_padding": [0, 0]}, "post_padding is given without pre_padding"),
        ([1, 2, 8, 8], [4, 2, 3, 3], {"padding": [0, 0], "pre_padding": [0, 0]}, "padding is given with pre_padding"),
    ],
)
def test_what_cannot_be_convolved(image, weight, options, message):
    g = graphs.new()
    g.conv_fprop(g.tensor(image), g.tensor(weight), **options, name="c").set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'c' \(conv_fprop\): {message}"):
        g.validate()


@pytest.mark.parametrize("wrong", [1, [1.5, 1], ["1", "1"], [True, True], object()])
def test_padding_is_a_sequence_of_integers(wrong):
    g = graphs.new()
    with pytest.raises(GraphTypeError, match=r"'conv_fprop.0'.*: padding must be a sequence of int, got"):
        g.conv_fprop(g.tensor([1, 2, 8, 8]), g.tensor([4, 2, 3, 3]), padding=wrong)


def test_what_a_caller_does_to_a_list_later_does_not_count():
    g, padding = graphs.new(), [1, 1]
    y = g.conv_fprop(g.tensor([1, 2, 8, 8]), g.tensor([4, 2, 3, 3]), padding=padding).set_output()
    padding.append(5)
    g.validate()
    assert y.get_dim() == [1, 4, 8, 8]


def test_one_key_for_each_spelling_of_a_window():
    def key(**options):
        g = graphs.new()
        g.conv_fprop(g.tensor([1, 2, 8, 8]), g.tensor([4, 2, 3, 3]), **options).set_output()
        g.validate()
        return g.key()

    same = {key(padding=[1, 1]), key(pre_padding=[1, 1], post_padding=(1, 1), stride=[1, 1], dilation=[1, 1])}
    assert len(same) == 1
    others = {key(pre_padding=[2, 1], post_padding=[0, 1]), key(padding=[1, 1], dilation=[1, 2]), key()}
    assert len(same | others) == 4


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
