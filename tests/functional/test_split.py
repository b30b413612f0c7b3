"""Tensors seen as so many times the same: every element stays where it is, and another number of them is what a call
of that number would give."""

import itertools
import random

import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.functional.layout import ALIGNMENT, Layout
from graphfuse.functional.split import CountKind, CountSplit, split
from graphfuse.functional.tensor_parameter import (
    TensorParameter,
    blocks,
    columns,
    columns_or_heads,
    like,
    rows,
    swizzled,
    types,
)

FLOAT = types(data_type.FLOAT)
X = TensorParameter("x", FLOAT)
WEIGHT = TensorParameter("weight", FLOAT, columns_or_heads("x"))
OUT = TensorParameter("out", FLOAT, like("x"), written=True)
PLAIN = (X, WEIGHT, OUT)


def laid(shape, stride=None) -> Layout:
    """Packed, if no stride is given."""
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return Layout(torch.float32, data_type.FLOAT, tuple(shape), tuple(stride), torch.device("cpu"), ALIGNMENT)


def of(arguments=PLAIN, **layouts: Layout) -> CountSplit:
    return split(arguments, layouts)


def offsets(t: Layout) -> list[int]:
    """Where the elements are, in order."""
    found = [0]
    for extent, stride in zip(t.shape, t.stride, strict=True):
        found = [at + n * stride for at in found for n in range(extent)]
    return found


def simple(shape, stride=None, weight=None, out=None) -> CountSplit:
    return of(x=laid(shape, stride), weight=laid(weight or shape[-1:]), out=laid(shape, out))


SHAPES = {
    (5, 8): (1, 5),
    (8,): (0, 1),
    (2, 3, 8): (2, 6),
    (2, 1, 3, 8): (3, 6),
    (1, 1, 8): (2, 1),
    (2, 3, 4, 5, 8): (4, 120),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_rows_are_counted(shape):
    found = simple(shape)
    assert (found.leading, found.count) == SHAPES[shape]
    if found.leading:
        assert found.kinds == {"x": CountKind.COUNTED, "weight": CountKind.FIXED, "out": CountKind.COUNTED}
        assert found.tail("x") == (8,) and found.tail("weight") == (8,) and found.row_stride("x") == 8


@pytest.mark.parametrize(
    ("shape", "stride", "leading"),
    [
        ((2, 3, 8), (48, 16, 1), 2),  # every other row
        ((2, 3, 8), (100, 16, 1), 1),  # more behind every third
        ((3, 2, 8), (8, 24, 1), 1),  # in another order
        ((1, 3, 8), (7, 16, 1), 2),  # one of what is apart
        ((2, 3, 8), (0, 0, 1), 2),  # one row again and again
        ((2, 3, 8), (0, 8, 1), 1),
        ((2, 3, 4, 8), (96, 32, 8, 1), 3),
        ((2, 3, 4, 8), (96, 40, 8, 1), 1),
        ((2, 3, 4, 8), (120, 40, 8, 1), 2),
    ],
)
def test_as_many_extents_as_one_stride_serves(shape, stride, leading):
    assert simple(shape, stride).leading == leading
    assert simple(shape, out=stride).leading == leading  # in any of the tensors


def test_heads_with_weights_of_their_own_are_not_counted():
    found = simple((5, 3, 8), weight=(3, 8))
    assert (found.leading, found.count, found.tail("x")) == (1, 5, (3, 8))


def test_one_weight_for_each_row_is_counted_with_it():
    found = simple((3, 8), weight=(3, 8))
    assert (found.leading, found.count) == (1, 3) and {*found.kinds.values()} == {CountKind.COUNTED}
    assert {t.shape for _, t in found.at(5)} == {(5, 8)}


def random_layouts(seed: int) -> dict[str, Layout]:
    chosen = random.Random(seed)
    shape = (*(chosen.choice((1, 1, 2, 3, 4)) for _ in range(chosen.randrange(1, 5))), 8)

    def apart() -> Layout:
        order, stride, step = [*range(len(shape) - 1)], [0] * len(shape), 8
        if chosen.random() < 0.3:
            chosen.shuffle(order)
        for axis in reversed(order):
            step *= chosen.choice((1, 1, 1, 2))
            stride[axis] = chosen.choice((0, 5, step)) if shape[axis] == 1 else step
            step *= shape[axis]
        return laid(shape, (*stride[:-1], 1))

    of_heads = len(shape) > 1 and chosen.random() < 0.3
    return {"x": apart(), "weight": laid(shape[-2:] if of_heads else shape[-1:]), "out": apart()}


@pytest.mark.parametrize("seed", range(200))
def test_every_element_stays_where_it_is(seed):
    layouts = random_layouts(seed)
    found = of(**layouts)
    for name, t in found.at(found.count):
        assert offsets(t) == offsets(layouts[name]), name


@pytest.mark.parametrize("seed", range(200))
def test_a_first_extent_that_grows(seed):
    """A tensor with the same strides and another first extent is what the split makes of the number, where the split
    says that it can grow; and it can wherever its first extent is not 1."""
    layouts = random_layouts(seed)
    found = of(**layouts)
    for name, t in layouts.items():
        if found.kinds[name] is not CountKind.COUNTED:
            continue
        assert found.can_grow(name) or t.shape[0] == 1
        for first in (1, 2, 5) if found.can_grow(name) else ():
            grown = laid((first, *t.shape[1:]), t.stride)
            count = found.count // t.shape[0] * first
            assert offsets(dict(found.at(count))[name]) == offsets(grown)


@pytest.mark.parametrize(
    ("stride", "grows"), [((96, 32, 1), True), ((8, 32, 1), False), ((0, 32, 1), False), ((1000, 32, 1), False)]
)
def test_one_row_with_a_stride_that_says_nothing(stride, grows):
    found = simple((1, 3, 8), stride)
    assert found.leading == 2 and found.can_grow("x") is grows and found.can_grow("out")


# Sizes that follow from the number

QUANTIZED = (
    X,
    TensorParameter("scale", FLOAT, blocks("x", 4)),
    TensorParameter("tiles", FLOAT, swizzled(blocks("x", 4))),
)


def tiles_of(count: int) -> int:
    return -(-count // 128) * 128 * 4


@pytest.mark.parametrize("leading", [(5,), (2, 3), (128,), (129,), (64, 2)])
def test_scales_in_rows_are_counted_and_in_tiles_sized(leading):
    count = torch.Size(leading).numel()
    given = {"x": laid((*leading, 16)), "scale": laid((*leading, 4)), "tiles": laid((tiles_of(count),))}
    found = of(QUANTIZED, **given)
    assert (
        found.count == count and found.kinds["scale"] is CountKind.COUNTED and found.kinds["tiles"] is CountKind.SIZED
    )
    for other in (1, 127, 128, 129, 1000):
        assert found.extents("tiles", other) == ((tiles_of(other),), (1,))
        assert dict(found.at(other))["tiles"].shape == (tiles_of(other),)
        assert dict(found.at(other))["scale"].shape == (other, 4)


def test_tiles_in_their_other_shape():
    found = of(QUANTIZED, x=laid((5, 16)), scale=laid((5, 4)), tiles=laid((128, 4)))
    assert found.extents("tiles", 130) == ((256, 4), (4, 1))


def test_one_value_for_each_row():
    arguments = (X, TensorParameter("inverse", FLOAT, rows("x")))
    found = of(arguments, x=laid((2, 3, 8)), inverse=laid((2, 3, 1)))
    assert found.leading == 2 and found.kinds["inverse"] is CountKind.COUNTED
    assert dict(found.at(7))["inverse"].shape == (7, 1)
    found = of(arguments, x=laid((2, 3, 8)), inverse=laid((2, 3, 1), (6, 1, 1)))
    assert found.leading == 1  # they lie otherwise


# Queries and keys: keys have heads of their own

QK = (
    TensorParameter("q", FLOAT),
    TensorParameter("k", FLOAT, lambda s: ((*s["q"][:-2], *s["k"][-2:-1], s["q"][-1]),), free=True),
    TensorParameter("q_weight", FLOAT, columns("q")),
    TensorParameter("k_weight", FLOAT, columns("k")),
)


@pytest.mark.parametrize(("heads", "others"), [(4, 2), (2, 1)])
@pytest.mark.parametrize("leading", [(5,), (1,), (2, 3)])
def test_heads_of_keys_stay(leading, heads, others):
    columns_ = {"q_weight": laid((8,)), "k_weight": laid((8,))}
    found = of(QK, q=laid((*leading, heads, 8)), k=laid((*leading, others, 8)), **columns_)
    assert found.leading == len(leading)
    sizes = {name: t.shape for name, t in found.at(9)}
    assert sizes == {"q": (9, heads, 8), "k": (9, others, 8), "q_weight": (8,), "k_weight": (8,)}


def test_as_many_keys_as_queries_are_counted_with_their_heads():
    columns_ = {"q_weight": laid((8,)), "k_weight": laid((8,))}
    found = of(QK, q=laid((5, 4, 8)), k=laid((5, 4, 8)), **columns_)
    assert found.count == 20 and {name: t.shape for name, t in found.at(9)}["k"] == (9, 8)


def test_slices_of_a_packed_tensor():
    columns_ = {"q_weight": laid((8,)), "k_weight": laid((8,))}
    for tokens, stride in itertools.product((1, 3), ((64, 8, 1),)):
        found = of(QK, q=laid((tokens, 4, 8), stride), k=laid((tokens, 2, 8), stride), **columns_)
        assert found.leading == 1 and found.count == tokens
        layouts = dict(found.at(tokens))
        assert [offsets(layouts[n]) for n in "qk"] == [offsets(found.layouts[n]) for n in "qk"]
