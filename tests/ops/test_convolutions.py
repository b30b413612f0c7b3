"""Convolutions and their gradients against float64 element by element, their shapes, strides and errors."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import GraphTypeError, GraphValidationError, convolution_mode, data_type
from graphfuse.ops.layouts import packed_stride
from support import dense, graphs
from support.graphs import BF16, FLOAT, TORCH
from support.operands import TYPES, hold, tensor, values

INT8, UINT8, INT32 = data_type.INT8, data_type.UINT8, data_type.INT32


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


@given(
    window=windows(),
    groups=st.integers(1, 3),
    types=st.tuples(*[st.sampled_from([INT8, UINT8])] * 2),
    made=st.sampled_from([INT32, FLOAT]),
)
def test_conv_of_integers(window, groups, types, made):
    """As cuDNN's users draw it: all in INT32, an identity behind it."""
    extents, taps, before, after, stride, dilation = window
    shapes = (2, groups * 2, *extents), (groups, 2, *taps)
    image, weight = (
        torch.randint(*(end for end in dtype.facts.integers), shape, generator=graphs.generator("cpu", seed)).to(
            getattr(torch, dtype.facts.torch)
        )
        for seed, (shape, dtype) in enumerate(zip(shapes, types, strict=True))
    )
    g = graphs.new(io_data_type=INT8, intermediate_data_type=INT32, compute_data_type=INT32)
    options = {"pre_padding": before, "post_padding": after, "stride": stride, "dilation": dilation}
    y = g.conv_fprop(tensor(g, image, types[0], "image"), tensor(g, weight, types[1], "weight"), **options)
    y = g.identity(y).set_output().set_name("y").set_data_type(made)
    g.validate()
    out = torch.empty(y.get_dim(), dtype=getattr(torch, made.facts.torch)).as_strided(y.get_dim(), y.get_stride())
    graphs.run(g, {"image": image, "weight": weight, "y": out})
    exact = dense.convolution(image.double(), weight.double(), before, after, stride, dilation)
    np.testing.assert_array_equal(out.numpy(), exact)


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


def gradients(image, weight, loss, types=(FLOAT,) * 4, **options):
    """(DX, DW), each of a graph of its own. types: of image, weight, loss and what is made."""
    made = []
    for port, like in (("DX", image), ("DW", weight)):
        g = graphs.new()
        given_loss = tensor(g, loss, types[2], "loss")
        if port == "DX":
            t = g.conv_dgrad(given_loss, tensor(g, weight, types[1], "filter"), **options)
        else:
            t = g.conv_wgrad(tensor(g, image, types[0], "image"), given_loss, **options)
        t.set_output().set_name("made").set_data_type(types[3]).set_dim(like.shape)
        g.validate()
        assert t.get_stride() == list(packed_stride(like.shape, [0, *range(2, like.dim()), 1])), "channels last"
        out = torch.full(like.shape, 7.0).to(TORCH[types[3]]).as_strided(like.shape, t.get_stride())
        pack = {"loss": loss, "made": out} | ({"filter": weight} if port == "DX" else {"image": image})
        graphs.run(g, pack)
        made.append(out)
    return made


@given(
    window=windows(),
    batch=st.integers(0, 2),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    made=st.integers(0, 2),
    types=st.tuples(*[st.sampled_from(TYPES)] * 4),
    turned=st.booleans(),
    data=st.data(),
)
def test_gradients(window, batch, groups, per_group, made, types, turned, data):
    extents, taps, before, after, stride, dilation = window
    out = [
        (e + b + a - d * (n - 1) - 1) // s + 1
        for e, n, b, a, s, d in zip(extents, taps, before, after, stride, dilation, strict=True)
    ]
    shapes = (batch, groups * per_group, *extents), (groups * made, per_group, *taps), (batch, groups * made, *out)
    image, weight, loss = (
        values(shape, dtype, seed, data.draw(st.permutations(range(len(shape)))))
        for seed, (shape, dtype) in enumerate(zip(shapes, types, strict=False))
    )
    options = {"pre_padding": before, "post_padding": after, "stride": stride, "dilation": dilation}
    if turned:
        options["convolution_mode"] = convolution_mode.CONVOLUTION
    dx, dw = gradients(image, weight, loss, types, **options)
    exact = dense.convolution_gradients(
        image.double(), weight.double(), loss.double(), before, after, stride, dilation, turned
    )
    hold(dx, exact[0], max(groups * made, 1) * math.prod(taps))
    hold(dw, exact[1], max(batch, 1) * math.prod(out))


def test_gradients_of_a_layer_of_an_autoencoder_take_seconds():
    image = values((1, 96, 4, 60, 104), BF16, 0, (0, 2, 3, 4, 1))
    weight, loss = values((96, 96, 3, 3, 3), BF16, 1), values((1, 96, 4, 60, 104), BF16, 2)
    start = time.process_time()
    dx, dw = gradients(image, weight, loss, (BF16, BF16, BF16, FLOAT), padding=[1, 1, 1])
    assert time.process_time() - start < 120
    # What a step along each makes of the sum of the loss times the result, which is linear in both.
    y = convolved(image, weight, (BF16, BF16, FLOAT), padding=[1, 1, 1]).double()
    total = (y * loss.double()).sum()
    for made, of in ((dx, image), (dw, weight)):
        np.testing.assert_allclose((made.double() * of.double()).sum(), total, rtol=1e-4)


@pytest.mark.parametrize(
    ("op", "loss", "other", "dim", "options", "message"),
    [
        ("conv_dgrad", [1, 4, 8, 8], [4, 2, 3, 3], None, {}, "DX has no dim, .* call set_dim on it with image's"),
        ("conv_wgrad", [1, 4, 8, 8], [1, 2, 8, 8], None, {}, "DW has no dim, .* call set_dim on it with weight's"),
        (
            "conv_dgrad",
            [1, 4, 8, 8],
            [4, 2, 3, 3],
            [1, 2, 8, 8],
            {},
            r"loss must have the shape of the convolution's result, \[1, 4, 6, 6\], got \[1, 4, 8, 8\] "
            r"\(DX \[1, 2, 8, 8\], filter \[4, 2, 3, 3\]\)",
        ),
        (
            "conv_wgrad",
            [1, 5, 8, 8],
            [1, 2, 8, 8],
            [4, 2, 3, 3],
            {"padding": [1, 1]},
            r"loss must .* \[1, 4, 8, 8\], got \[1, 5, 8, 8\] \(image \[1, 2, 8, 8\], DW \[4, 2, 3, 3\]\)",
        ),
        ("conv_dgrad", [1, 4, 6, 6], [4, 2, 3, 3], [1, 3, 8, 8], {}, "DX has 3 channels, .* multiple of filter's 2"),
        ("conv_wgrad", [1, 4, 6, 6], [1, 2, 8, 8], [4, 2, 9, 3], {}, "DW spans 9 elements along axis 2; .* image has"),
        ("conv_dgrad", [1, 4, 6, 6], [4, 2, 3, 3], [1, 2, 8], {}, r"DX must be .*got \[1, 2, 8\] and \[4, 2, 3, 3\]"),
        ("conv_dgrad", [1, 4, 6, 6], [4, 2, 3, 3], [1, 2, 8, 8], {"stride": [1]}, r"stride must be 2 integers >= 1"),
    ],
)
def test_what_has_no_gradients(op, loss, other, dim, options, message):
    g = graphs.new()
    loss, other = g.tensor(loss), g.tensor(other)
    operands = (loss, other) if op == "conv_dgrad" else (other, loss)
    made = getattr(g, op)(*operands, **options, name="c").set_output()
    if dim is not None:
        made.set_dim(dim)
    with pytest.raises(GraphValidationError, match=rf"node 'c' \({op}\): {message}"):
        g.validate()
