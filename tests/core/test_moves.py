"""transpose and slice: each element where it belongs, strides as views have them, and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import GraphTypeError, GraphValidationError, reduction_mode
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: g.transpose(x, [0, 0]), r"permutation must have each of input's axes 0 to 1 once, got \[0, 0\]"),
        (lambda g, x: g.transpose(x, [1]), r"permutation must have each .* got \[1\]"),
        (lambda g, x: g.transpose(x, [-1, 0]), r"permutation must have each .* got \[-1, 0\]"),
        (lambda g, x: g.slice(x, [slice(1)]), r"slices must be one for each axis of input \[3, 4\], got 1"),
        (lambda g, x: g.slice(x, [slice(None, None, -1), slice(1)]), "of axis 0 has step -1; accepted: 1 and above"),
        (lambda g, x: g.slice(x, [slice(1), slice(None, None, 0)]), "of axis 1: .*step cannot be zero"),
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
    g.transpose(y, (1, 0)).set_output()
    exec(str(g), scope)  # noqa: S102 - the point of the test
    g.validate(), scope["graph"].validate()
    assert scope["graph"].key() == g.key() and hash(g._ir.nodes[0]) == hash(scope["graph"]._ir.nodes[0])
