"""sdpa against float64 row by row, its masks, shapes, strides and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import (
    GraphNotSupportedError,
    GraphTypeError,
    GraphValidationError,
    attention_implementation,
    data_type,
    diagonal_alignment,
    heur_mode,
)
from graphfuse.ops import OPS
from support import dense, graphs, oracle
from support.graphs import BF16, E4M3, FLOAT, HALF, TORCH

TOP_LEFT, BOTTOM_RIGHT = diagonal_alignment.TOP_LEFT, diagonal_alignment.BOTTOM_RIGHT


def values(shape, dtype=FLOAT, seed=0):
    return torch.randn(shape, generator=graphs.generator("cpu", seed)).to(TORCH[dtype])


def attended(q, k, v, dtype=FLOAT, scale=None, bias=None, scale_as=float, **options):
    """(O, Stats or None)"""
    g, pack = graphs.new(), {"q": q, "k": k, "v": v}
    tensors = [g.tensor_like(t, name=name) for name, t in pack.items()]
    if bias is not None:
        options["bias"] = g.tensor_like(bias, name="bias")
        pack["bias"] = bias
    if scale is not None:
        options["attn_scale"] = scale
    if scale_as is not float:
        options["attn_scale"] = g.tensor([1, 1, 1, 1], name="scale", is_pass_by_value=scale_as == "value")
        pack["scale"] = scale if scale_as == "value" else torch.full((1, 1, 1, 1), scale)
    o, stats = g.sdpa(*tensors, **options)
    o.set_output().set_name("o").set_data_type(dtype)
    made = {"o": torch.full((*q.shape[:3], v.shape[3]), 7.0).to(TORCH[dtype])}
    if stats is not None:
        stats.set_output().set_name("stats")
        made["stats"] = torch.full((*q.shape[:3], 1), 7.0)
    g.validate()
    for t, name in ((o, "o"), (stats, "stats")):
        assert t is None or t.get_stride() == list(made[name].stride()), "row-major, whatever the inputs"
    assert stats is None or stats.get_data_type() is FLOAT
    graphs.run(g, pack | made)
    return made["o"], made.get("stats")


def hold(got, exact):
    exact = torch.from_numpy(exact)
    if got.dtype is torch.float32:
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    else:
        close = (got.double() - exact).abs() <= 1e-5
        assert (close | (oracle.ulps(got, oracle.rounded(exact, got.dtype)) <= 1)).all()


@given(
    batch=st.integers(0, 2),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    rows=st.tuples(st.integers(0, 7), st.integers(1, 7)),
    columns=st.tuples(st.integers(0, 9), st.integers(0, 5)),
    types=st.tuples(*[st.sampled_from([BF16, HALF, FLOAT, E4M3])] * 4),
    scale=st.sampled_from([None, 0.125, -2.0]),
    scale_as=st.sampled_from([float, "value", "tensor"]),
    bias=st.one_of(st.none(), st.tuples(*[st.booleans()] * 4)),
    left=st.one_of(st.none(), st.integers(1, 8)),
    right=st.one_of(st.none(), st.integers(0, 8)),
    aligned=st.sampled_from(diagonal_alignment),
    stats=st.booleans(),
)
def test_sdpa(batch, heads, rows, columns, types, scale, scale_as, bias, left, right, aligned, stats):
    most = heads[0] * heads[1] * heads[2]
    q = values((batch, most, rows[0], columns[0]), types[0], 0)
    k = values((batch, heads[1], rows[1], columns[0]), types[1], 1)
    v = values((batch, heads[2], rows[1], columns[1]), types[2], 2)
    full = (batch, most, *rows)
    bias = None if bias is None else values([e if b else 1 for b, e in zip(bias, full, strict=True)], FLOAT, 3)
    got = attended(
        q,
        k,
        v,
        types[3],
        scale,
        bias,
        float if scale is None else scale_as,
        generate_stats=stats,
        diagonal_alignment=aligned,
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=right,
    )
    exact = dense.attention(
        q.double(), k.double(), v.double(), 1.0 if scale is None else scale, bias, left, right, aligned is BOTTOM_RIGHT
    )
    hold(got[0], exact[0])
    assert (got[1] is not None) == stats
    if stats:
        hold(got[1], exact[1])


SPELLINGS = {
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "causal, stated": ({"diagonal_alignment": TOP_LEFT, "diagonal_band_right_bound": 0}, {"right": 0}),
    "bottom right": ({"use_causal_mask_bottom_right": True}, {"right": 0, "bottom_right": True}),
    "window": ({"use_causal_mask": True, "sliding_window_length": 2}, {"right": 0, "left": 2}),
    "window, stated": ({"use_causal_mask": True, "diagonal_band_left_bound": 2}, {"right": 0, "left": 2}),
    "none": ({}, {}),
}


@pytest.mark.parametrize(("options", "means"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_masks(options, means):
    q, k, v = values((1, 4, 5, 8)), values((1, 2, 7, 8), seed=1), values((1, 1, 7, 3), seed=2)
    hold(attended(q, k, v, **options)[0], dense.attention(q, k, v, **means)[0])


def test_masked_columns_do_not_count():
    """Another value of a masked key changes no bit."""
    q, k, v = values((1, 1, 6, 8)), values((1, 1, 6, 8), seed=1), values((1, 1, 6, 4), seed=2)
    one = attended(q, k, v, use_causal_mask=True)[0]
    k[0, 0, 3:] *= -100
    other = attended(q, k, v, use_causal_mask=True)[0]
    assert torch.equal(one[:, :, :3], other[:, :, :3]) and not torch.equal(one, other)


def test_a_row_with_nothing_to_attend_to():
    """Whether the mask or the bias leaves nothing: zeros, and -infinity for its log-sum-exp."""
    q, k, v = values((1, 1, 4, 8)), values((1, 1, 2, 8), seed=1), values((1, 1, 2, 3), seed=2)
    o, stats = attended(q, k, v, use_causal_mask_bottom_right=True, generate_stats=True)
    assert (o[0, 0, :2] == 0).all() and (stats[0, 0, :2] == -math.inf).all()
    assert stats[0, 0, 2:].isfinite().all() and (o[0, 0, 2:] != 0).all()
    bias = torch.zeros(1, 1, 4, 2)
    bias[0, 0, 1] = -math.inf
    o, stats = attended(q, k, v, bias=bias, generate_stats=True)
    assert (o[0, 0, 1] == 0).all() and stats[0, 0, 1] == -math.inf
    exact = dense.attention(q, k, v)
    for got, want in zip((o, stats), exact, strict=True):
        np.testing.assert_allclose(got[0, 0, [0, 2, 3]], want[0, 0, [0, 2, 3]], rtol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = values((1, 1, 3, 8)) * 1000, values((1, 1, 5, 8), seed=1) * 1000, values((1, 1, 5, 4), seed=2)
    o, stats = attended(q, k, v, is_inference=False)
    exact = dense.attention(q, k, v)
    np.testing.assert_allclose(stats, exact[1], rtol=1e-5)
    np.testing.assert_allclose(o, exact[0], rtol=1e-4, atol=1e-4)
    q[0, 0, 1, 0] = math.nan
    o, stats = attended(q, k, v, is_inference=False)
    assert o[0, 0, 1].isnan().all() and stats[0, 0, 1].isnan() and o[0, 0, ::2].isfinite().all()


def test_heads_that_lie_beside_each_other():
    """q, k and v of one packed buffer [batch, rows, heads, columns], and O in that layout."""
    packed = values((2, 6, 4 + 2 + 2, 16), BF16)
    q, k, v = (t.transpose(1, 2) for t in packed.split([4, 2, 2], dim=2))
    g = graphs.new(io_data_type=BF16)
    o = g.sdpa(*(g.tensor_like(t, name=name) for t, name in ((q, "q"), (k, "k"), (v, "v"))), attn_scale=0.25)[0]
    o.set_output().set_name("o").set_dim([2, 4, 6, 16]).set_stride([6 * 4 * 16, 16, 4 * 16, 1])
    out = torch.empty(2, 6, 4, 16, dtype=torch.bfloat16)
    graphs.run(g, {"q": q, "k": k, "v": v, "o": out.transpose(1, 2)})
    hold(out.transpose(1, 2), dense.attention(q.double(), k.double(), v.double(), 0.25)[0])


@pytest.mark.parametrize(
    ("options", "makes"),
    [
        ({}, False),
        ({"generate_stats": True}, True),
        ({"generate_stats": False}, False),
        ({"is_inference": False}, True),
        ({"is_inference": True}, False),
        ({"generate_stats": True, "is_inference": False}, True),
    ],
)
def test_when_there_are_stats(options, makes):
    g = graphs.new()
    o, stats = g.sdpa(*(g.tensor([1, 1, 4, 8]) for _ in "qkv"), **options)
    assert (stats is not None) == makes and o.get_name() == "sdpa.0::O"


Q, K = [2, 4, 6, 8], [2, 2, 5, 8]
WRONG = {
    "rank": ([4, 6, 8], K, K, {}, r"q, k and v must be \[batch, heads, rows, columns\], got \[4, 6, 8\]"),
    "batch": (Q, [1, 2, 5, 8], [1, 2, 5, 8], {}, "q, k and v must have one batch"),
    "rows": (Q, K, [2, 2, 6, 8], {}, "k and v as many rows"),
    "columns": (Q, [2, 2, 5, 7], K, {}, "q and k as many columns"),
    "no rows": (Q, [2, 2, 0, 8], [2, 2, 0, 8], {}, r"k \[2, 2, 0, 8\] has no rows to attend to"),
    "heads of k": (Q, [2, 3, 5, 8], K, {}, "k has 3 heads, which must divide the 4 of q"),
    "heads of v": (Q, K, [2, 0, 5, 8], {}, "v has 0 heads, which must divide the 4 of q"),
    "right": (Q, K, K, {"diagonal_band_right_bound": -1}, "diagonal_band_right_bound is -1; accepted: .*>= 0"),
    "left": (Q, K, K, {"diagonal_band_left_bound": 0}, "diagonal_band_left_bound is 0; accepted: .*>= 1"),
    "window": (Q, K, K, {"sliding_window_length": 0}, "sliding_window_length is 0; accepted: .*>= 1"),
    "two lefts": (
        Q,
        K,
        K,
        {"sliding_window_length": 1, "diagonal_band_left_bound": 1},
        "sliding_window_length and diagonal_band_left_bound are both given",
    ),
    "two rights": (
        Q,
        K,
        K,
        {"use_causal_mask": True, "diagonal_band_right_bound": 0},
        "use_causal_mask and diagonal_band_right_bound are both given",
    ),
    "two corners": (
        Q,
        K,
        K,
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
        "use_causal_mask and use_causal_mask_bottom_right are both given",
    ),
    "corners": (
        Q,
        K,
        K,
        {"use_causal_mask": True, "diagonal_alignment": BOTTOM_RIGHT},
        "use_causal_mask and diagonal_alignment=BOTTOM_RIGHT contradict",
    ),
    "stats": (Q, K, K, {"generate_stats": True, "is_inference": True}, "generate_stats and is_inference are both True"),
}


@pytest.mark.parametrize(("q", "k", "v", "options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(q, k, v, options, message):
    g = graphs.new()
    g.sdpa(g.tensor(q), g.tensor(k), g.tensor(v), **options, name="a")[0].set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'a' \(sdpa\): .*{message}"):
        g.validate()


@pytest.mark.parametrize(
    ("port", "dim", "message"),
    [
        ("bias", [2, 4, 6, 4], r"bias must have the extents of the scores .*\[2, 4, 6, 5\], or 1, got \[2, 4, 6, 4\]"),
        ("bias", [6, 5], r"bias must have the extents .*got \[6, 5\]"),
        ("attn_scale", [1, 4, 1, 1], r"attn_scale must have one element, got shape \[1, 4, 1, 1\]"),
    ],
)
def test_what_scores_are_scaled_and_shifted_by(port, dim, message):
    g = graphs.new()
    g.sdpa(g.tensor(Q), g.tensor(K), g.tensor(K), **{port: g.tensor(dim)})[0].set_output()
    with pytest.raises(GraphValidationError, match=message):
        g.validate()


@pytest.mark.parametrize(("name", "only"), [(n, only) for n, (only, _) in OPS["sdpa"].not_offered.items()])
def test_options_that_are_not_offered(name, only):
    g = graphs.new()
    q, k, v = g.tensor(Q), g.tensor(K), g.tensor(K)
    g.sdpa(q, k, v, **{name: only})  # cuDNN's default
    for value in (g.tensor([1]), 1, True, (0.1, q, q)):
        with pytest.raises(GraphNotSupportedError, match=rf"node 'a' \(sdpa\): {name} is .*; instead: \w"):
            g.sdpa(q, k, v, **{name: value}, name="a")
    g.sdpa(q, k, v, name="a")[0].set_output()  # what was refused has left nothing behind


@pytest.mark.parametrize("asked", attention_implementation)
def test_the_implementation_does_not_change_the_result(asked):
    """It is part of the graph, and kept with it, unless it is cuDNN's choice."""

    def drawn(**options):
        g = graphs.new()
        tensors = [g.tensor(dim, name=name) for name, dim in (("q", Q), ("k", K), ("v", K))]
        g.sdpa(*tensors, attn_scale=0.5, **options)[0].set_output().set_name("o")
        g.build([heur_mode.FALLBACK])
        return g

    asking, plain = drawn(implementation=asked), drawn(implementation=None)
    assert (asking.key() == plain.key()) == (asked is attention_implementation.AUTO)
    assert graphfuse.pygraph.from_json(asking.to_json()).key() == asking.key()
    pack = {name: torch.randn(dim) for name, dim in (("q", Q), ("k", K), ("v", K))}
    outs = [torch.empty(*Q[:3], K[3]) for _ in range(2)]
    for g, out in zip((asking, plain), outs, strict=True):
        g.execute(pack | {"o": out})
    assert torch.equal(*outs)


def test_no_implementation():
    g = graphs.new()
    with pytest.raises(GraphTypeError, match="implementation must be attention_implementation, got 'unified'"):
        g.sdpa(g.tensor(Q), g.tensor(K), g.tensor(K), implementation="unified")


def test_an_argument_in_cudnns_place():
    g = graphs.new()
    q, k, v = g.tensor(Q), g.tensor(K), g.tensor(K)
    with pytest.raises(GraphTypeError, match="attn_scale must be .*got True; by position: q, k, v, attn_scale, bias"):
        g.sdpa(q, k, v, True)  # is_inference


def test_types_of_options():
    g = graphs.new()
    q, k, v = g.tensor(Q), g.tensor(K), g.tensor(K)
    for options in ({"use_causal_mask": 1}, {"diagonal_alignment": "TOP_LEFT"}, {"sliding_window_length": True}):
        with pytest.raises(GraphTypeError, match=f"'sdpa.0'.*{next(iter(options))} must be"):
            g.sdpa(q, k, v, **options)
    with pytest.raises(GraphTypeError, match="sdpa: .*unexpected keyword argument 'colour'"):
        g.sdpa(q, k, v, colour=1)


def test_compute_in_double():
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.float64, generator=graphs.generator("cpu", s)) for s in range(3))
    g = graphs.new(io_data_type=data_type.DOUBLE)
    tensors = [g.tensor([1, 2, 4, 8], name=name) for name in "qkv"]
    g.sdpa(*tensors, compute_data_type=data_type.DOUBLE, use_causal_mask=True)[0].set_output().set_name("o")
    out = torch.empty(1, 2, 4, 8, dtype=torch.float64)
    graphs.run(g, {"q": q, "k": k, "v": v, "o": out})
    np.testing.assert_allclose(out, dense.attention(q, k, v, right=0)[0], rtol=1e-13, atol=1e-14)
