"""Tensors of a graph as a program has them, and the extents that they have together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphfuse.base.dtypes import from_foreign
from graphfuse.torch.fusion.meaning import hint, same


@dataclass(frozen=True, eq=False)
class SeenTensor:
    """A tensor as a program has it: its dimensions in the order of the program's axes, columns last. order: their
    numbers in the tensor."""

    axes: tuple[int, ...]
    shape: tuple[object, ...]
    stride: tuple[object, ...]
    order: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(t: torch.Tensor, axes: Sequence[int], columns: int) -> SeenTensor:
        """columns: the axis that becomes the last."""
        moved = [-1 if axis == columns else axis - (axis > columns) for axis in axes]
        order = tuple(sorted(range(len(moved)), key=moved.__getitem__))
        in_order = (tuple(values[d] for d in order) for values in (moved, t.shape, t.stride()))
        return SeenTensor(*in_order, order, from_foreign(t.dtype).name)

    @property
    def is_packed(self) -> bool:
        """True if rows lie one after the other."""
        expected: object = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if not same(extent, 1) and not same(stride, expected):
                return False
            expected = expected * extent
        return True

    def lies_as(self, other: SeenTensor) -> bool:
        pairs = zip(self.shape, self.stride, other.stride, strict=False)
        return len(self.shape) == len(other.shape) and all(same(n, 1) or same(a, b) for n, a, b in pairs)


class SharedExtents:
    """The extents of rows, by axis counted from the last. is_one: whether all tensors have the same."""

    def __init__(self, rank: int):
        self._rank, self._known, self.is_one = rank, dict[int, object](), True

    def add(self, axes: Sequence[int], shape: Sequence[object]) -> None:
        for axis, n in zip(axes, shape, strict=True):
            if not same(n, 1):
                self.is_one &= same(self._known.setdefault(axis, n), n)

    def pattern(self, seen: SeenTensor) -> str:
        found = dict(zip(seen.axes, seen.shape, strict=True))

        def kind(axis: int) -> str:
            if axis not in found:
                return "-"
            return "1" if same(found[axis], 1) and not same(self._known.get(axis, 1), 1) else "n"

        return "".join(kind(axis) for axis in range(-self._rank, 0))

    def padded(self, seen: SeenTensor) -> tuple[int, ...]:
        found = dict(zip(seen.axes, map(hint, seen.shape), strict=True))
        return tuple(found.get(axis, 1) for axis in range(-self._rank, 0))
