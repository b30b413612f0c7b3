"""rotate_pairs, gather_rows, add_rows and join: what they compute, as torch and numpy have it, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import GraphNotSupportedError, GraphValidationError, data_type, heur_mode
from support import graphs, oracle


def run(g, out, pack):
    out.set_output().set_name("out")
    g.validate()
    made = torch.empty_strided(out.get_dim(), out.get_stride()).fill_(-1.0)
    graphs.run(g, pack | {"out": made})
    return made


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    heads=st.integers(1, 3),
    pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    interleaved=st.booleans(),
    inverse=st.booleans(),
    wide=st.booleans(),
)
def test_rotate_pairs(heads, pairs, rest, interleaved, inverse, wide):
    x, g = normal(4, heads, 2 * pairs + rest), graphs.new()
    cos, sin = (normal(4, heads if wide else 1, pairs, seed=n) for n in (1, 2))
    tensors = [g.tensor(list(t.shape), name=name) for name, t in (("x", x), ("cos", cos), ("sin", sin))]
    out = g.rotate_pairs(*tensors, interleaved=interleaved, inverse=inverse)
    got = run(g, out, {"x": x, "cos": cos, "sin": sin})
    angles = (t.expand(4, heads, pairs) for t in (cos, -sin if inverse else sin))
    torch.testing.assert_close(got.double(), oracle.rotated(x, *angles, interleaved), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_turn_pairs(interleaved):
    """A rotation by a right angle."""
    x, g = normal(4, 3, 8), graphs.new()
    out = g.turn_pairs(g.tensor([4, 3, 8], name="x"), interleaved=interleaved)
    cos, sin = torch.zeros(4, 3, 4), torch.ones(4, 3, 4)
    assert torch.equal(run(g, out, {"x": x}).double(), oracle.rotated(x, cos, sin, interleaved))


ROPE = {"input": False, "dY": True}


@pytest.mark.parametrize("port", ROPE)
@given(
    rows=st.integers(1, 4),
    more=st.integers(0, 2),
    rest=st.integers(0, 3),
    pairs=st.integers(1, 4),
    scale=st.sampled_from([None, 1, 1.37]),
    half=st.booleans(),
)
def test_rope_is_cudnns(port, rows, more, rest, pairs, scale, half):
    """The last columns by angles of rows, all of them scaled; backward turns the other way."""
    x, freqs = (
        normal(2, 3, rows, rest + 2 * pairs),
        100 * normal(rows + more, 1, 1, pairs if half else 2 * pairs, seed=1),
    )
    g = graphs.new()
    call = g.rope if port == "input" else g.rope_backward
    tensors = {name: g.tensor(list(t.shape), name=name) for name, t in ((port, x), ("freqs", freqs))}
    if rest:
        out = call(**tensors, output_scale=scale, rope_dim=2 * pairs)
    else:
        out = call(*tensors.values(), scale)
    got = run(g, out, {port: x, "freqs": freqs})
    angles = freqs[:rows, 0, 0, :pairs].double().expand(2, 3, rows, pairs)
    turned = oracle.rotated(x[..., rest:], angles.cos(), -angles.sin() if ROPE[port] else angles.sin())
    want = torch.cat((x[..., :rest].double(), turned), -1) * (scale or 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_rope_before_attention():
    """Queries and keys rotated and scaled in one graph with sdpa, their last columns alone."""
    q, k, v = (normal(1, 2, 6, 12, seed=n) for n in range(3))
    freqs, g = normal(8, 1, 1, 8, seed=3), graphs.new()
    tensors = {name: g.tensor(list(t.shape), name=name) for name, t in (("q", q), ("k", k), ("v", v), ("freqs", freqs))}
    turned = {
        name: g.rope(input=tensors[name], freqs=tensors["freqs"], output_scale=1.3, rope_dim=8) for name in ("q", "k")
    }
    out, _ = g.sdpa(**turned, v=tensors["v"], is_inference=True, attn_scale=0.25)
    got = run(g, out, {"q": q, "k": k, "v": v, "freqs": freqs})
    angles = freqs[:6, 0, 0, :4].double().expand(1, 2, 6, 4)
    both = (
        1.3 * torch.cat((t[..., :4].double(), oracle.rotated(t[..., 4:], angles.cos(), angles.sin())), -1)
        for t in (q, k)
    )
    want = torch.nn.functional.scaled_dot_product_attention(*both, v.double(), scale=0.25)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_names_of_ropes_outputs():
    g = graphs.new()
    x, freqs = g.tensor([1, 2, 3, 4], name="x"), g.tensor([3, 1, 1, 4], name="freqs")
    assert g.rope(x, freqs, name="turn").get_name() == "turn::OUTPUT"
    assert g.rope_backward(dY=x, freqs=freqs, name="back").get_name() == "back::DX"


@pytest.mark.parametrize(
    "shape, freqs, rope_dim, message",
    [
        ((2, 3, 4), (3, 1, 1, 4), 0, r"input must have rank 4, .*, got \[2, 3, 4\]"),
        ((1, 2, 3, 5), (3, 1, 1, 4), 0, "rope_dim is 0; accepted: an even number up to 5"),
        ((1, 2, 3, 4), (3, 1, 1, 4), 3, "rope_dim is 3; accepted: an even number up to 4"),
        ((1, 2, 3, 4), (3, 1, 1, 4), 6, "rope_dim is 6; accepted: an even number up to 4"),
        ((1, 2, 3, 4), (3, 1, 1, 4), -2, "rope_dim is -2; accepted"),
        ((1, 2, 3, 4), (2, 1, 1, 4), 0, r"freqs must have dim \[3 or more, 1, 1, 4\], .*, got \[2, 1, 1, 4\]"),
        ((1, 2, 3, 4), (3, 2, 1, 4), 0, "freqs must have dim"),
        ((1, 2, 3, 4), (3, 1, 1, 4), 2, r"freqs must have dim \[3 or more, 1, 1, 2\]"),
        ((1, 2, 3, 4), (3, 4), 0, "freqs must have dim"),
    ],
)
def test_what_rope_does_not_take(shape, freqs, rope_dim, message):
    g = graphs.new()
    made = g.rope(g.tensor(shape, name="x"), g.tensor(freqs, name="freqs"), rope_dim=rope_dim, name="turn")
    made.set_output()
    with pytest.raises(GraphValidationError, match="node 'turn'.*" + message):
        g.validate()


def test_the_oracle_is_the_rule_by_elements():
    x, cos, sin = normal(2, 10), normal(2, 4, seed=1), normal(2, 4, seed=2)
    for interleaved in (False, True):
        want = x.double().numpy().copy()
        for row, i in np.ndindex(2, 4):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            a, b, c, s = (float(t) for t in (x[row, one], x[row, two], cos[row, i], sin[row, i]))
            want[row, one], want[row, two] = a * c - b * s, b * c + a * s
        torch.testing.assert_close(oracle.rotated(x, cos, sin, interleaved).numpy(), want)


@pytest.mark.parametrize("dtype", [data_type.INT32, data_type.INT64])
@pytest.mark.parametrize("shape", [(3, 1, 1), (4, 2, 1)], ids=str)
def test_gather_rows(shape, dtype):
    table, g = normal(5, 1, 6), graphs.new()
    kind = torch.int32 if dtype is data_type.INT32 else torch.int64
    index = torch.randint(5, shape, generator=torch.Generator().manual_seed(0)).to(kind)
    index[0, 0], index[1, 0] = 5, -1
    out = g.gather_rows(g.tensor([5, 1, 6], name="table"), g.tensor(list(shape), data_type=dtype, name="index"))
    got = run(g, out, {"table": table, "index": index})
    assert out.get_dim() == [*shape[:2], 6]
    for at in np.ndindex(*shape[:2]):
        number = int(index[at])
        want = table[number, 0] if 0 <= number < 5 else torch.full((6,), torch.nan)
        torch.testing.assert_close(got[at], want, equal_nan=True, rtol=0, atol=0)


def test_gather_rows_of_several_heads():
    table, index, g = normal(5, 3, 6), torch.tensor([4, 0]).view(2, 1, 1), graphs.new()
    tensors = g.tensor([5, 3, 6], name="table"), g.tensor([2, 1, 1], data_type=data_type.INT64, name="index")
    assert torch.equal(run(g, g.gather_rows(*tensors), {"table": table, "index": index}), table[[4, 0]])


def test_rows_of_large_numbers():
    """float32 does not hold the number, nor the values."""
    count, last = 2**24 + 2, 2**53 + 1
    g = graphs.new(io_data_type=data_type.INT64)
    x = g.tensor([count, 1], [0, 1], name="x", data_type=data_type.INT64)
    flags = g.tensor([count, 1], name="flags", data_type=data_type.UINT8)
    index = g.tensor([2, 1], name="index")
    g.gather_rows(x, index).set_output().set_name("out")
    found = g.gather_rows(flags, index).set_output().set_name("found").set_data_type(data_type.UINT8)
    marked = torch.zeros(count, 1, dtype=torch.uint8)
    marked[-1] = 1
    made = {"out": torch.empty(2, 1, dtype=torch.int64), "found": torch.empty(2, 1, dtype=torch.uint8)}
    given = {"x": torch.tensor([last]).as_strided((count, 1), (0, 1)), "flags": marked}
    graphs.run(g, {**given, "index": torch.tensor([[count - 1], [count]]), **made})
    assert made["out"].tolist() == [[last], [0]] and made["found"].tolist() == [[1], [0]]
    assert found.get_dim() == [2, 1]


@pytest.mark.parametrize("dtype", [data_type.INT64, data_type.INT32, data_type.DOUBLE])
def test_scatter_rows_keeps_what_float_does_not_hold(dtype):
    kind = getattr(torch, dtype.facts.torch)
    g = graphs.new(io_data_type=dtype)
    x, index = g.tensor([2, 1], name="x"), g.tensor([2, 1], name="index", data_type=data_type.INT32)
    g.scatter_rows(x, index).set_dim([3, 1]).set_output().set_name("out")
    made = torch.tensor([[2**24 + 1], [7], [2**24 + 3]], dtype=kind)
    given = torch.tensor([[2**30 + 1], [5]], dtype=kind)
    graphs.run(g, {"x": given, "index": torch.tensor([[1], [-1]], dtype=torch.int32), "out": made})
    assert made.tolist() == [[2**24 + 1], [2**30 + 1], [2**24 + 3]]


def test_scatter_rows_of_another_type():
    g = graphs.new()
    x, index = g.tensor([2, 1], name="x"), g.tensor([2, 1], name="index", data_type=data_type.INT32)
    made = g.scatter_rows(x, index).set_dim([3, 1]).set_output().set_name("out").set_data_type(data_type.INT64)
    assert made.get_data_type() is data_type.INT64
    memory = torch.tensor([[2**53 + 1], [7], [2**24 + 1]])
    given = torch.tensor([[2.5], [9.0]])
    graphs.run(g, {"x": given, "index": torch.tensor([[1], [3]], dtype=torch.int32), "out": memory})
    assert memory.tolist() == [[2**53 + 1], [2], [2**24 + 1]]


def test_scatter_rows_keeps_no_fp4():
    g = graphs.new()
    x, index = g.tensor([2, 32], name="x"), g.tensor([2, 1], name="index", data_type=data_type.INT32)
    g.scatter_rows(x, index).set_dim([3, 32]).set_output().set_data_type(data_type.FP4_E2M1)
    with pytest.raises(GraphNotSupportedError, match="FP4_E2M1 and kept in part"):
        g.build([heur_mode.FALLBACK])


@pytest.mark.parametrize("dtype", [data_type.INT32, data_type.INT64])
@pytest.mark.parametrize(
    ("made", "read", "numbers"),
    [
        ((4, 3), (6, 3), (6, 1)),
        ((4, 1, 3), (5, 2, 3), (5, 2, 1)),
        ((4, 2, 3), (5, 2, 3), (5, 1, 1)),
        ((2, 3), (0, 3), (0, 1)),
    ],
    ids=str,
)
def test_add_rows(made, read, numbers, dtype):
    """Numbers that stand twice, and such as the output has not."""
    x, g = normal(*read), graphs.new()
    index = torch.randint(-1, made[0] + 1, numbers, generator=torch.Generator().manual_seed(0))
    index = index.to(torch.int32 if dtype is data_type.INT32 else torch.int64)
    tensors = [g.tensor(list(read), name="x"), g.tensor(list(numbers), data_type=dtype, name="index")]
    got = run(g, g.add_rows(*tensors).set_dim(list(made)), {"x": x, "index": index})
    want = np.zeros(made)
    for at in np.ndindex(*read):
        row = int(index[tuple(0 if e == 1 else i for e, i in zip(numbers, at, strict=True))])
        if 0 <= row < made[0]:
            want[(row, *(0 if e == 1 else i for e, i in zip(made[1:], at[1:], strict=True)))] += float(x[at])
    torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=1e-6, atol=1e-6)


def test_join():
    a, b, g = normal(2, 3, 4), normal(2, 1, 4, seed=1), graphs.new()
    out = g.join(g.tensor([2, 3, 4], name="a"), g.tensor([2, 1, 4], name="b"), -2)
    assert torch.equal(run(g, out, {"a": a, "b": b}), torch.cat((a, b), 1))


REFUSED = {
    "columns without a pair": (
        lambda g, t: g.turn_pairs(t(4, 3, 7)),
        "input has 7 columns; accepted: an even number of them, 2 or more",
    ),
    "cos of another shape": (
        lambda g, t: g.rotate_pairs(t(4, 3, 8), t(4, 1, 2), t(4, 1, 3)),
        r"cos and sin must have one shape, got \[4, 1, 2\] and \[4, 1, 3\]",
    ),
    "too many pairs": (
        lambda g, t: g.rotate_pairs(t(4, 3, 7), t(4, 1, 4), t(4, 1, 4)),
        r"cos has 4 columns; accepted: one for each pair of columns, 1 to 3 of input \[4, 3, 7\]",
    ),
    "cos of other rows": (
        lambda g, t: g.rotate_pairs(t(4, 3, 8), t(3, 1, 4), t(3, 1, 4)),
        r"cos must have extents 1 or input's but along the last axis, got \[3, 1, 4\] of \[4, 3, 8\]",
    ),
    "index of columns": (
        lambda g, t: g.gather_rows(t(4, 8), t(3, 8)),
        r"index must have extent 1 along the last axis.*got \[3, 8\] and input \[4, 8\]",
    ),
    "a sum without a shape": (lambda g, t: g.add_rows(t(4, 8), t(4, 1)), "output has no dim, .*: call set_dim on it"),
    "a sum of other rows": (
        lambda g, t: g.add_rows(t(4, 8), t(3, 1)).set_dim([5, 8]),
        r"that gather_rows makes of output \[5, 8\] and index \[3, 1\], \[3, 8\], got \[4, 8\]",
    ),
    "ranks": (lambda g, t: g.gather_rows(t(4, 8), t(3, 1, 1)), "input and index must have one rank"),
    "join of other columns": (
        lambda g, t: g.join(t(4, 8), t(4, 7), 0),
        r"a and b must have equal extents but along axis 0, got \[4, 8\] and \[4, 7\]",
    ),
    "join along no axis": (lambda g, t: g.join(t(4, 8), t(4, 8), 2), "axis 2 is outside the inputs' rank 2"),
}


@pytest.mark.parametrize("draw, message", REFUSED.values(), ids=REFUSED)
def test_refused(draw, message):
    g = graphs.new()
    draw(g, lambda *shape: g.tensor(list(shape))).set_output()
    with pytest.raises(GraphValidationError, match=message):
        g.validate()
