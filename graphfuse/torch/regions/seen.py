"""Tensors of a graph as a program has them, and the extents that they have together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graphfuse.base.dtypes import from_foreign
from graphfuse.torch.fusion.meaning import hint, same
from graphfuse.torch.regions.columns import ColumnAxes
from graphfuse.torch.regions.groups import Groups
from graphfuse.torch.regions.program import RowExtents


@dataclass(frozen=True, eq=False)
class SeenTensor:
    """A tensor as a program has it: its dimensions in the order of the program's axes, columns last. order: their
    numbers in the tensor. part: as of ``RowExtents``."""

    axes: tuple[int, ...]
    shape: tuple[object, ...]
    stride: tuple[object, ...]
    order: tuple[int, ...]
    dtype: str
    part: int

    @staticmethod
    def of(
        t: torch.Tensor, axes: Sequence[int], columns: ColumnAxes, part: int, places: Mapping[int, int] | None = None
    ) -> SeenTensor:
        """columns: what becomes the last axis. places: of axes that become others."""
        moved = [(places or {}).get(axis, axis) for axis in map(columns.place, axes)]
        order = tuple(sorted(range(len(moved)), key=moved.__getitem__))
        in_order = (tuple(values[d] for d in order) for values in (moved, t.shape, t.stride()))
        return SeenTensor(*in_order, order, from_foreign(t.dtype).name, part)

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
        """Axes as which rows lie one after the other, where there are such: by the number that each has."""
        order = sorted(range(len(self.axes) - 1), key=lambda n: -hint(self.stride[n]))
        *rows, columns = (*order, len(self.axes) - 1)
        shape, stride = (tuple(of[n] for n in (*rows, columns)) for of in (self.shape, self.stride))
        is_packed = replace(self, shape=shape, stride=stride).is_packed
        return {self.axes[n]: axis for n, axis in zip(rows, self.axes, strict=False)} if is_packed else {}

    def lies_as(self, other: SeenTensor) -> bool:
        pairs = zip(self.shape, self.stride, other.stride, strict=False)
        return len(self.shape) == len(other.shape) and all(same(n, 1) or same(a, b) for n, a, b in pairs)


class SharedExtents:
    """The extents of rows that tensors have, and of parts of these, by axis counted from the last. is_one: whether all
    tensors that were added have the same."""

    def __init__(self, tensors: Sequence[SeenTensor], parts: Groups | None):
        self._rank = max(-min(seen.axes, default=-1) - (seen.part > 0) for seen in tensors)
        self._known: dict[tuple[int, bool], object] = {}
        if parts is not None:
            self._known |= {(-2, True): parts.count, (-1, True): parts.columns}
        self.is_one = True

    def add(self, seen: SeenTensor) -> None:
        for axis, n in zip(seen.axes, seen.shape, strict=True):
            if not same(n, 1):
                self.is_one &= same(self._known.setdefault(self._key(seen, axis), n), n)

    def said(self, seen: SeenTensor) -> tuple[str, str, int]:
        """Axes, type and part of a tensor, as inputs and outputs have them."""
        return self.pattern(seen), seen.dtype, seen.part

    def is_whole(self, seen: SeenTensor) -> bool:
        return RowExtents(self.pattern(seen), seen.part).whole

    @staticmethod
    def _key(seen: SeenTensor, axis: int) -> tuple[int, bool]:
        """Axis of rows, and False; one of those that take the place of their last, and True."""
        if not seen.part:
            return axis, False
        return (axis, True) if axis >= -2 else (axis + 1, False)

    def _axes(self, seen: SeenTensor) -> range:
        return range(-self._rank - (seen.part > 0), 0)

    def pattern(self, seen: SeenTensor) -> str:
        found = dict(zip(seen.axes, seen.shape, strict=True))

        def kind(axis: int) -> str:
            if axis not in found:
                return "-"
            return "1" if same(found[axis], 1) and not same(self._known.get(self._key(seen, axis), 1), 1) else "n"

        return "".join(map(kind, self._axes(seen)))

    def padded(self, seen: SeenTensor) -> tuple[int, ...]:
        found = dict(zip(seen.axes, map(hint, seen.shape), strict=True))
        return tuple(found.get(axis, 1) for axis in self._axes(seen))
