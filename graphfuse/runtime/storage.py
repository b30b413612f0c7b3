"""Layout of a tensor in memory, and whether two layouts overlap."""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import VariantPackError
from graphfuse.base.ragged import ROWS
from graphfuse.op_graph.ir import FrozenTensor

Shape = tuple[int, ...]

# Limit for the exact overlap test, in numpy's candidate solutions. Beyond it, layouts count as overlapping.
_OVERLAP_WORK = 10_000


@dataclass(frozen=True)
class Storage:
    """Layout of a tensor in memory, in storage elements of itemsize bytes. Of FP4 it is one byte with two values."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extents other than 1. Two shapes agree if these do."""
        return tuple(e for e in self.dim if e != 1)

    @cached_property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(extent, stride) of the axes that have more than one position."""
        return tuple((e, s) for e, s in zip(self.dim, self.stride, strict=True) if e > 1)

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one, for strides that are not negative."""
        return 0 if 0 in self.dim else self.itemsize * (1 + sum((e - 1) * s for e, s in self.layout))


def storage(tensor: FrozenTensor) -> Storage:
    """Layout of a tensor; for a reordered one, that of all its bytes. Raises VariantPackError for an FP4 tensor whose
    pairs do not fill bytes."""
    if tensor.reordering is not tensor_reordering.NONE:
        return Storage((tensor.nbytes,), (1,), 1)
    if tensor.ragged is not None:
        # The first row of each head, which is in memory for any offsets.
        dim = (1, *(1 if axis == ROWS else extent for axis, extent in enumerate(tensor.dim) if axis))
        return Storage(dim, tensor.stride, tensor.dtype.bits // 8)
    if tensor.dtype is not data_type.FP4_E2M1:
        return Storage(tensor.dim, tensor.stride, tensor.dtype.bits // 8)
    axis = tensor.packed_axis
    if tensor.elements == 0 and axis is None:
        return Storage(tensor.dim, tensor.stride, 1)
    others = [s for a, s in enumerate(tensor.stride) if a != axis and tensor.dim[a] > 1]
    if axis is None or tensor.dim[axis] % 2 or any(s % 2 for s in others):
        raise VariantPackError(
            f"{tensor} cannot be stored; accepted for FP4_E2M1: an even extent along one axis of stride 1, "
            "even strides along the others"
        )
    dim = tuple(e // 2 if a == axis else e for a, e in enumerate(tensor.dim))
    stride = tuple(1 if a == axis else s // 2 for a, s in enumerate(tensor.stride))
    return Storage(dim, stride, 1)


def unpacked(dtype: data_type, dim: Shape, stride: Shape) -> tuple[Shape, Shape]:
    """dim and stride in elements, from those in storage elements; the inverse of `storage`.

    Pairs of FP4 are along the last axis of stride 1 (the last axis if none has it).
    """
    if dtype is not data_type.FP4_E2M1 or not dim:
        return dim, stride
    axis = max((a for a, s in enumerate(stride) if s == 1), default=len(dim) - 1)
    grown = tuple(e * 2 if a == axis else e for a, e in enumerate(dim))
    return grown, tuple(s if a == axis else s * 2 for a, s in enumerate(stride))


def overlap(one: Storage, at: int, two: Storage, other_at: int) -> bool:
    """True if two layouts at byte addresses share a byte, or if checking that takes too long.

    The check is exact, so interleaved views of one allocation (columns 0:8 and 8:16 of its rows) do not overlap.
    """
    if 0 in one.dim or 0 in two.dim:
        return False
    import numpy

    try:
        return numpy.shares_memory(_view(one, at), _view(two, other_at), max_work=_OVERLAP_WORK)
    except numpy.exceptions.TooHardError:
        return True


def _view(stored: Storage, address: int):
    """numpy array at an address, which is never read or written."""
    import numpy

    interface = {
        "version": 3,
        "typestr": f"|V{stored.itemsize}",
        "shape": stored.dim,
        "strides": tuple(s * stored.itemsize for s in stored.stride),
        "data": (address, False),
    }
    return numpy.asarray(SimpleNamespace(__array_interface__=interface))
