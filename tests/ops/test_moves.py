"""transpose, slice, reshape, expand, concatenate: each element where it belongs, strides, and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import (
    GraphNotSupportedError,
    GraphTypeError,
    GraphValidationError,
    data_type,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
    reshape_mode,
)
from support import graphs


def run(g, x, out):
    out.set_output().set_name("out")
    g.validate()
    made = torch.empty_strided(out.get_dim(), out.get_stride()).fill_(-1.0)
    graphs.run(g, {"x": x, "out": made})
    return made


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_transpose(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    x, g = torch.arange(float(np.prod(shape))).reshape(shape), graphs.new()
    out = g.transpose(g.tensor(shape, name="x"), order)
    got = run(g, x, out)
    assert out.get_dim() == [shape[axis] for axis in order]
    assert out.get_stride() == [x.stride()[axis] for axis in order]
    for at in np.ndindex(*got.shape):
        place = [0] * len(shape)
        for axis, i in zip(order, at, strict=True):
            place[axis] = i
        assert got[at] == x[tuple(place)]


ENDS = st.one_of(st.none(), st.integers(-6, 6))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_slice(shape, data):
    steps = st.one_of(st.none(), st.integers(1, 3))
    slices = [slice(data.draw(ENDS), data.draw(ENDS), data.draw(steps)) for _ in shape]
    x, g = torch.arange(float(np.prod(shape))).reshape(shape), graphs.new()
    out = g.slice(g.tensor(shape, name="x"), slices)
    got = run(g, x, out)
    want = np.arange(float(np.prod(shape))).reshape(shape)[tuple(slices)]
    assert out.get_dim() == list(want.shape)
    assert out.get_stride() == [s * (c.step or 1) for s, c in zip(x.stride(), slices, strict=True)]
    assert np.array_equal(got.numpy(), want)


@given(data=st.data())
def test_reshape(data):
    """Element by element in row-major order, however input and output lie."""
    factors = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cut = sorted(data.draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
    made = [int(np.prod(factors[a:b])) for a, b in zip([0, *cut], cut, strict=False)]
    shape = data.draw(st.permutations(factors))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(float(np.prod(shape))).reshape([shape[a] for a in order]).permute(*np.argsort(order).tolist())
    g = graphs.new()
    out = g.reshape(g.tensor(x.shape, x.stride(), name="x"), reshape_mode.LOGICAL).set_dim(made)
    got = run(g, x, out)
    assert out.get_stride() == list(torch.empty(made).stride())
    assert [got[at] for at in np.ndindex(*made)] == [x[at] for at in np.ndindex(*shape)]


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_expand(shape, data):
    shape = [data.draw(st.sampled_from((1, extent))) for extent in shape]
    made = [data.draw(st.integers(0, 4)) if extent == 1 else extent for extent in shape]
    x, g = torch.arange(float(np.prod(shape))).reshape(shape), graphs.new()
    out = g.expand(g.tensor(shape, name="x")).set_dim(made)
    got = run(g, x, out)
    assert out.get_stride() == list(torch.empty(made).stride())
    assert np.array_equal(got.numpy(), np.broadcast_to(x.numpy(), made))


def test_reshape_of_rows_keeps_their_type_and_follows_other_shapes():
    g = graphs.new(is_override_shape_enabled=True)
    x = g.tensor([4, 6], name="x")
    out = g.reshape(g.mul(x, 2.0)).set_dim([4, 2, 3]).set_output().set_name("out")
    g.build([heur_mode.FALLBACK])
    for rows in (4, 2):
        data, made = torch.randn(rows, 6, generator=graphs.generator("cpu", rows)), torch.empty(rows, 2, 3)
        shapes = {} if rows == 4 else {"override_uids": [x.get_uid(), out.get_uid()]}
        if shapes:
            shapes |= {"override_shapes": [[rows, 6], [rows, 2, 3]], "override_strides": [None, None]}
        size = g.get_workspace_size(**shapes)
        g.execute({"x": data, "out": made}, torch.empty(size, dtype=torch.uint8) if size else None, **shapes)
        assert torch.equal(made, (2 * data).view(rows, 2, 3))


@given(data=st.data())
def test_concatenate(data):
    shape, axis = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)), 0
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    extents = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    g, parts, names = graphs.new(), [], []
    for n, extent in enumerate(extents):
        own = [*shape]
        own[axis] = extent
        parts.append(torch.randn(own, generator=graphs.generator("cpu", n)))
        names.append(g.tensor(own, name=f"part{n}"))
    out = g.concatenate(axis, inputs=names, name="all").set_output().set_name("out")
    g.validate()
    made = torch.empty(out.get_dim())
    graphs.run(g, {"out": made, **{f"part{n}": t for n, t in enumerate(parts)}})
    assert np.array_equal(made.numpy(), np.concatenate([t.numpy() for t in parts], axis))
    assert g.nodes[-1].name == "all" and len(g.nodes) == len(extents) - 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g, x: g.concatenate(0, inputs=[x]), GraphTypeError, "inputs must be a list of two tensors or more"),
        (lambda g, x: g.concatenate(0, inputs=x), GraphTypeError, "inputs must be a list of two tensors or more"),
        (
            lambda g, x: g.concatenate(0, inputs=[x, x, "y"]),
            GraphTypeError,
            r"inputs\[2\] must be a tensor of this graph",
        ),
        (
            lambda g, x: g.concatenate(0, 1, inputs=[x, x], name="all"),
            GraphNotSupportedError,
            "concatenate 'all': in_place_index is .; instead: leave it out",
        ),
        (
            lambda g, x: g.concatenate(0, inputs=[x, x, graphs.new().tensor([3, 4], name="theirs")]),
            GraphValidationError,
            r"inputs\[2\] \('theirs'\) belongs to another graph",
        ),
    ],
)
def test_what_concatenate_does_not_take(call, error, message):
    g = graphs.new()
    with pytest.raises(error, match=message):
        call(g, g.tensor([3, 4]))
    assert not g.nodes


def test_of_a_broadcast_input():
    """Its strides would put several elements at one address; what is written is packed."""
    g = graphs.new()
    out = g.transpose(g.tensor([3, 4], [0, 1], name="x"), [1, 0])
    x = torch.arange(4.0).expand(3, 4)
    assert torch.equal(run(g, x, out), x.T) and out.get_stride() == [3, 1]


def test_among_other_nodes():
    """Keys that lie as [rows, heads * columns] become [heads, columns, rows], in one plan with what reads them."""
    g = graphs.new()
    x = g.tensor([1, 6, 2, 4], name="x")
    k = g.transpose(g.slice(x, [slice(None), slice(1, 6), slice(None), slice(0, 4)]), [0, 2, 3, 1])
    out = g.reduction(g.mul(k, 2.0), mode=reduction_mode.ADD).set_dim([1, 2, 4, 1])
    data = torch.randn(1, 6, 2, 4, generator=graphs.generator("cpu", 0))
    torch.testing.assert_close(run(g, data, out), 2 * data[:, 1:].sum(1).unsqueeze(-1))


WIDE = {
    data_type.INT64: torch.tensor([2**53 + 1, -(2**63), 3, 2**24 + 1, 0, 2**63 - 1]),
    data_type.INT32: torch.tensor([2**24 + 1, -(2**31), 3, 2**31 - 1, 0, 5], dtype=torch.int32),
    data_type.DOUBLE: torch.tensor([1 / 3, 1e300, -0.0, float("inf"), float("nan"), 2.0], dtype=torch.float64),
}


def wide(dtype):
    g = graphs.new(io_data_type=dtype)
    return g, g.tensor([2, 3], name="x"), WIDE[dtype].view(2, 3)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("dtype", WIDE, ids=lambda d: d.name)
def test_values_that_float_does_not_hold(dtype, declared):
    """Through virtual tensors, too."""
    g, x, data = wide(dtype)
    if declared:
        g = graphs.new(io_data_type=dtype, intermediate_data_type=dtype, intermediate_rounding="declared")
        x = g.tensor([2, 3], name="x")
    flat = g.reshape(g.slice(g.transpose(x, [1, 0]), [slice(1, 3), slice(None)])).set_dim([4])
    g.concatenate(0, inputs=[flat, flat]).set_output().set_name("out")
    made = torch.empty(8, dtype=data.dtype)
    graphs.run(g, {"x": data, "out": made})
    want = data.T[1:].reshape(4)
    assert torch.equal(made.view(torch.uint8), torch.cat([want, want]).view(torch.uint8))
    assert "values between nodes kept in the compute type" in g.get_numerical_notes_at_index(0)[0]


@pytest.mark.parametrize(
    "stored", [data_type.FLOAT, data_type.INT32, data_type.INT64, data_type.HALF, data_type.FP8_E4M3]
)
@pytest.mark.parametrize("dtype", WIDE, ids=lambda d: d.name)
def test_wide_values_are_rounded_once(dtype, stored):
    g, x, data = wide(dtype)
    g.transpose(x, [1, 0]).set_output().set_name("out").set_data_type(stored)
    kind = getattr(torch, stored.facts.torch)
    made = torch.empty_strided((3, 2), (1, 3), dtype=kind)
    graphs.run(g, {"x": data, "out": made})
    if stored.facts.integers:
        low, high = stored.facts.integers
        values = (0 if v != v else min(max(v, low), high) for v in data.T.flatten().tolist())
        assert made.flatten().tolist() == [round(v) for v in values]
        return
    want = data.T.double().clamp(-448, 448) if stored is data_type.FP8_E4M3 else data.T
    assert np.array_equal(made.double().numpy(), want.to(kind).double().numpy(), equal_nan=True)


def test_a_large_integer_is_rounded_to_float_but_once():
    """By way of float64 it would be one less: 2^60 + 2^36, which lies in the middle of two floats."""
    g = graphs.new(io_data_type=data_type.INT64)
    g.transpose(g.tensor([1, 1], name="x"), [0, 1]).set_output().set_name("out").set_data_type(data_type.FLOAT)
    made = torch.empty(1, 1)
    graphs.run(g, {"x": torch.tensor([[2**60 + 2**36 + 1]]), "out": made})
    assert made.item() == 2**60 + 2**37


JOINED = {
    **{dtype: data.view(2, 3) for dtype, data in WIDE.items()},
    data_type.FLOAT: torch.tensor([[0.1, -3.0, 2.0**30]]),
    data_type.UINT8: torch.tensor([[1, 200, 3]], dtype=torch.uint8),
    data_type.BOOLEAN: torch.tensor([[True, False, True]]),
}


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("a", WIDE, ids=lambda d: d.name)
@pytest.mark.parametrize("b", JOINED, ids=lambda d: d.name)
def test_wide_values_beside_those_of_another_type(a, b, between):
    """Also those that a virtual tensor holds, but for INT64 beside floats, of which that has 53 bits."""
    g = graphs.new()
    x, y = (g.tensor(list(JOINED[d].shape), name=n, data_type=d) for n, d in (("x", a), ("y", b)))
    out = g.join(x, y, 0)
    data = JOINED[a]
    if between:
        out = g.slice(out, [slice(None), slice(None)])
        data = data % 2**53 if a is data_type.INT64 and b.is_float else data
    out.set_output().set_name("out").set_data_type(a)
    made = torch.empty(2 + len(JOINED[b]), 3, dtype=data.dtype)
    graphs.run(g, {"x": data, "y": JOINED[b], "out": made})
    assert torch.equal(made[:2].contiguous().view(torch.uint8), data.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", WIDE, ids=lambda d: d.name)
def test_what_is_read_in_the_compute_type_is_carried_in_it(dtype):
    """So that generated kernels read it."""
    g = graphs.new(device="emulator")
    x, weight = g.tensor([64, 2, 256], name="x", data_type=dtype), g.tensor([1, 1, 256], name="weight")
    moved = g.reshape(g.slice(x, [slice(32), slice(None), slice(None)])).set_dim([64, 1, 256])
    g.rmsnorm(moved, weight, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    assert g.get_engine_and_knobs_at_index(0)[0] == ("reference", "rows")


def test_a_wide_tensor_that_nodes_of_two_types_read():
    g, x, data = wide(data_type.DOUBLE)
    g.mul(x, 1.0, compute_data_type=data_type.FLOAT).set_output().set_name("narrow").set_data_type(data_type.FLOAT)
    g.mul(x, 1.0, compute_data_type=data_type.DOUBLE).set_output().set_name("out")
    made = torch.empty(2, 3, dtype=torch.float64)
    graphs.run(g, {"x": data, "narrow": torch.empty(2, 3), "out": made})
    assert np.array_equal(made.numpy(), data.numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: g.transpose(x, [0, 0]), r"permutation must have each of input's axes 0 to 1 once, got \[0, 0\]"),
        (lambda g, x: g.transpose(x, [1]), r"permutation must have each .* got \[1\]"),
        (lambda g, x: g.transpose(x, [-1, 0]), r"permutation must have each .* got \[-1, 0\]"),
        (lambda g, x: g.slice(x, [slice(1)]), r"slices must be one for each axis of input \[3, 4\], got 1"),
        (lambda g, x: g.slice(x, [slice(None, None, -1), slice(1)]), "of axis 0 has step -1; accepted: 1 and above"),
        (lambda g, x: g.slice(x, [slice(1), slice(None, None, 0)]), "of axis 1: .*step cannot be zero"),
        (lambda g, x: g.reshape(x), "output has no dim, which nothing else says: call set_dim on it"),
        (lambda g, x: g.reshape(x).set_dim([5, 2]), r"as many elements as input, 12, got \[5, 2\] with 10"),
        (
            lambda g, x: g.reshape(x, reshape_mode.VIEW_ONLY).set_dim([12]),
            "reshape_mode is reshape_mode.VIEW_ONLY; accepted: reshape_mode.LOGICAL, which is the same for tensors",
        ),
        (lambda g, x: g.expand(x), "output has no dim, which nothing else says: call set_dim on it"),
        (
            lambda g, x: g.expand(x).set_dim([3, 5]),
            r"input's rank, .* where they are not 1, got \[3, 5\] of input \[3, 4\]",
        ),
        (lambda g, x: g.expand(x).set_dim([2, 3, 4]), r"input's rank, .* got \[2, 3, 4\] of input \[3, 4\]"),
        (lambda g, x: g.concatenate(2, inputs=[x, x]), "axis 2 is outside the inputs' rank 2"),
        (lambda g, x: g.slice(x, [slice(1), slice("a")]), "of axis 1: slice indices must be integers"),
    ],
)
def test_what_is_refused(call, message):
    g = graphs.new()
    call(g, g.tensor([3, 4])).set_output()
    with pytest.raises(GraphValidationError, match=message):
        g.validate()


@pytest.mark.parametrize("wrong", [None, 1, [0, 1], "ab"])
def test_slices_are_slices(wrong):
    g = graphs.new()
    with pytest.raises(GraphTypeError, match="'slice.0'.*: slices must be a sequence of slice, got"):
        g.slice(g.tensor([3, 4]), wrong)


def test_it_prints_as_python():
    g, scope = graphs.new(), {}
    y = g.slice(g.tensor([3, 4], name="x"), [slice(0, 2), slice(1, None, 2)])
    g.reshape(g.transpose(y, (1, 0))).set_dim([4]).set_output()
    exec(str(g), scope)  # noqa: S102 - the point of the test
    g.validate(), scope["graph"].validate()
    assert scope["graph"].key() == g.key() and hash(g._ir.nodes[0]) == hash(scope["graph"]._ir.nodes[0])
