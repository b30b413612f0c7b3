"""Tensors of a graph as a program sees them, and the extents that they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from graphfuse.base.dtypes import from_foreign
from graphfuse.torch.analysis.meaning import hint, same
from graphfuse.torch.regions.columns import ColumnAxes
from graphfuse.torch.regions.groups import Groups
from graphfuse.torch.regions.program import RowExtents


@dataclass(frozen=True, eq=False)
class ProgramTensor:
    """A tensor as a program sees it: its dimensions in the order of the program's axes, columns last.

    tensor: with one dimension for the columns. axis: the program's axis of each of its dimensions. part: as in
    ``RowExtents``.
    """

    tensor: torch.Tensor
    axis: tuple[int, ...]
    part: int

    @staticmethod
    def of(t: torch.Tensor, axes: Sequence[int], columns: ColumnAxes, part: int) -> ProgramTensor | None:
        """The tensor as a program sees it; None if no view of it has its columns as one dimension. columns: axes that
        become the last."""
        found = columns.joined(t, axes)
        return None if found is None else ProgramTensor(found[0], tuple(map(columns.place, found[1])), part)

    def moved(self, places: Mapping[int, int]) -> ProgramTensor:
        """The tensor with some axes replaced. places: the new axes, by axis."""
        return replace(self, axis=tuple(places.get(axis, axis) for axis in self.axis))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Dimensions of the tensor, in the order of the axes."""
        return tuple(sorted(range(len(self.axis)), key=self.axis.__getitem__))

    axes = cached_property(lambda self: tuple(self.axis[d] for d in self.order))
    shape = cached_property(lambda self: tuple(self.tensor.shape[d] for d in self.order))
    stride = cached_property(lambda self: tuple(self.tensor.stride(d) for d in self.order))

    @property
    def is_packed(self) -> bool:
        """True if rows lie one after the other."""
        expected: object = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if not same(extent, 1) and not same(stride, expected):
                return False
            expected = expected * extent
        return True

    def places(self) -> dict[int, int]:
        """New axes, by axis, with which rows lie one after the other; empty if there are none."""
        *rows, _ = self.axes
        stride = dict(zip(self.axes, self.stride, strict=True))
        found = dict(zip(sorted(rows, key=lambda axis: -hint(stride[axis])), rows, strict=True))
        return found if self.moved(found).is_packed else {}

    def lies_as(self, other: ProgramTensor) -> bool:
        pairs = zip(self.shape, self.stride, other.stride, strict=False)
        return len(self.shape) == len(other.shape) and all(same(n, 1) or same(a, b) for n, a, b in pairs)


class SharedExtents:
    """Extents of rows, and of parts of rows, that tensors share, by axis counted from the last. is_one: whether all
    tensors that are read have the same."""

    def __init__(self, read: Collection[ProgramTensor], made: Sequence[ProgramTensor], parts: Groups | None):
        self._rank = max(-min(one.axes, default=-1) - (one.part > 0) for one in (*read, *made))
        self._known: dict[tuple[int, bool], object] = {}
        if parts is not None:
            self._known |= {(-2, True): parts.count, (-1, True): parts.columns}
        self.is_one = True
        extents = ((self._key(one, axis), n) for one in read for axis, n in zip(one.axes, one.shape, strict=True))
        for key, n in extents:
            if not same(n, 1):
                self.is_one &= same(self._known.setdefault(key, n), n)

    def fields(self, one: ProgramTensor) -> tuple[str, str, int]:
        """Axes, type and part of a tensor, as inputs and outputs of a program have them."""
        return self.pattern(one), from_foreign(one.tensor.dtype).name, one.part

    def is_whole(self, one: ProgramTensor) -> bool:
        return RowExtents(self.pattern(one), one.part).whole

    @staticmethod
    def _key(one: ProgramTensor, axis: int) -> tuple[int, bool]:
        """Key of an axis: its number, and True if it is one of the two that replace the last axis of rows."""
        if not one.part:
            return axis, False
        return (axis, True) if axis >= -2 else (axis + 1, False)

    def _axes(self, one: ProgramTensor) -> range:
        return range(-self._rank - (one.part > 0), 0)

    def pattern(self, one: ProgramTensor) -> str:
        found = dict(zip(one.axes, one.shape, strict=True))

        def kind(axis: int) -> str:
            if axis not in found:
                return "-"
            return "1" if same(found[axis], 1) and not same(self._known.get(self._key(one, axis), 1), 1) else "n"

        return "".join(map(kind, self._axes(one)))

    def padded(self, one: ProgramTensor) -> tuple[int, ...]:
        found = dict(zip(one.axes, map(hint, one.shape), strict=True))
        return tuple(found.get(axis, 1) for axis in self._axes(one))
