"""Storage and overlap against what numpy itself says about real arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError
from graphfuse.op_graph.ir import FrozenTensor
from graphfuse.runtime.storage import Storage, overlap, storage

pytestmark = pytest.mark.torch


def tensor(dtype: data_type, dim: tuple[int, ...], stride: tuple[int, ...]) -> FrozenTensor:
    return FrozenTensor(0, 0, "t", dtype, dim, stride)


def test_a_byte_or_more_is_stored_as_declared():
    assert storage(tensor(data_type.BFLOAT16, (3, 5), (8, 1))) == Storage((3, 5), (8, 1), 2)


@pytest.mark.parametrize(
    "dim, stride, expected",
    [
        ((3, 32), (32, 1), Storage((3, 16), (16, 1), 1)),
        ((3, 32), (48, 1), Storage((3, 16), (24, 1), 1)),
        ((32, 4), (1, 64), Storage((16, 4), (1, 32), 1)),
        ((1, 3, 2), (6, 2, 1), Storage((1, 3, 1), (3, 1, 1), 1)),
        ((0, 32), (32, 1), Storage((0, 16), (16, 1), 1)),
    ],
)
def test_fp4_pairs_are_bytes(dim, stride, expected):
    assert storage(tensor(data_type.FP4_E2M1, dim, stride)) == expected


@pytest.mark.parametrize("dim, stride", [((3, 31), (32, 1)), ((3, 32), (33, 1)), ((3, 32), (64, 2)), ((1, 1), (1, 1))])
def test_fp4_that_does_not_fill_bytes(dim, stride):
    with pytest.raises(VariantPackError, match="accepted for FP4_E2M1: an even extent"):
        storage(tensor(data_type.FP4_E2M1, dim, stride))


@st.composite
def layouts(draw) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """(dim, stride, itemsize, byte offset) of a small strided array."""
    axes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=3))
    dim, stride = zip(*axes, strict=True)
    return dim, stride, draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 40))


def occupied(dim, stride, itemsize, offset) -> set[int]:
    """Every byte the array touches, one by one."""
    bytes_ = set()
    for index in np.ndindex(*dim):
        start = offset + itemsize * sum(i * s for i, s in zip(index, stride, strict=True))
        bytes_.update(range(start, start + itemsize))
    return bytes_


@given(layouts(), layouts())
def test_overlap_is_sharing_a_byte(a, b):
    base = 1 << 40  # nothing lies there: nothing may be read
    shared = bool(occupied(*a) & occupied(*b))
    assert overlap(Storage(*a[:3]), base + a[3], Storage(*b[:3]), base + b[3]) == shared


@given(layouts())
def test_nbytes_is_where_the_last_byte_ends(a):
    touched = occupied(*a[:3], 0)
    assert Storage(*a[:3]).nbytes == (max(touched) + 1 if touched else 0)


def test_interleaved_columns_are_separate_and_large_ones_are_quick():
    left = Storage((1 << 20, 3, 64), (3 * 128 + 8, 128, 1), 2)
    assert not overlap(left, 4096, left, 4096 + 128)
    assert overlap(left, 4096, left, 4096 + 126)


def test_what_is_too_hard_to_tell_counts_as_overlap(monkeypatch):
    from graphfuse.runtime import storage as module

    monkeypatch.setattr(module, "_OVERLAP_WORK", 1)
    odd = Storage((40, 40, 40), (1009, 1013, 1019), 2)
    with pytest.raises(np.exceptions.TooHardError):
        view = module._view(odd, 1 << 40)
        np.shares_memory(view, module._view(odd, (1 << 40) + 7), max_work=1)
    assert overlap(odd, 1 << 40, odd, (1 << 40) + 7)
