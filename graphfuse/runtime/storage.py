"""How a tensor lies in memory, and whether two tensors share any of it."""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import VariantPackError
from graphfuse.base.ragged import ROWS
from graphfuse.op_graph.ir import FrozenTensor

Shape = tuple[int, ...]

# Effort for the exact overlap test, in numpy's candidate solutions; what needs more counts as an overlap.
_OVERLAP_WORK = 10_000


@dataclass(frozen=True)
class Storage:
    """Layout of a tensor in memory: a storage element is itemsize bytes, FP4 two values in one byte."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extents other than 1, which is all that has to agree."""
        return tuple(e for e in self.dim if e != 1)

    @cached_property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(extent, stride) of the axes that have more than one position."""
        return tuple((e, s) for e, s in zip(self.dim, self.stride, strict=True) if e > 1)

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first to past the last, for strides that are not negative."""
        return 0 if 0 in self.dim else self.itemsize * (1 + sum((e - 1) * s for e, s in self.layout))


def storage(tensor: FrozenTensor) -> Storage:
    """The storage of a tensor, of a reordered one all bytes that it takes. VariantPackError for an FP4 tensor
    whose pairs do not fill bytes."""
    if tensor.reordering is not tensor_reordering.NONE:
        return Storage((tensor.nbytes,), (1,), 1)
    if tensor.ragged is not None:
        # All that is known to be there whatever the offsets: the first row of each head.
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
    """dim and stride in elements, from those in storage elements: the way back from `storage`.

    Pairs lie along the last axis of stride 1 (the last axis if none has it).
    """
    if dtype is not data_type.FP4_E2M1 or not dim:
        return dim, stride
    axis = max((a for a, s in enumerate(stride) if s == 1), default=len(dim) - 1)
    grown = tuple(e * 2 if a == axis else e for a, e in enumerate(dim))
    return grown, tuple(s if a == axis else s * 2 for a, s in enumerate(stride))


def overlap(one: Storage, at: int, two: Storage, other_at: int) -> bool:
    """True if two layouts at byte addresses share a byte; True also where finding out takes too long.

    Exact, so that interleaved views of one allocation (columns 0:8 and 8:16 of its
    rows) count as separate.
    """
    if 0 in one.dim or 0 in two.dim:
        return False
    import numpy

    try:
        return numpy.shares_memory(_view(one, at), _view(two, other_at), max_work=_OVERLAP_WORK)
    except numpy.exceptions.TooHardError:
        return True


def _view(stored: Storage, address: int):
    """Memory at an address for numpy to reason about; nothing ever reads or writes it."""
    import numpy

    interface = {
        "version": 3,
        "typestr": f"|V{stored.itemsize}",
        "shape": stored.dim,
        "strides": tuple(s * stored.itemsize for s in stored.stride),
        "data": (address, False),
    }
    return numpy.asarray(SimpleNamespace(__array_interface__=interface))
