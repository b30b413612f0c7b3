"""Dimensions that rows lie along: one, or several that programs treat as one, as the channels and pixels of an
image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphfuse.torch.analysis.meaning import same


@dataclass(frozen=True, order=True)
class ColumnAxes:
    """Axes that rows lie along, in order, counted from the last of the largest tensor. extents: of several axes; the
    extent of a single one may vary."""

    axes: tuple[int, ...] = (-1,)
    extents: tuple[int, ...] = ()

    @staticmethod
    def of(extents: Mapping[int, object]) -> ColumnAxes | None:
        """Columns along axes; None if the axes are not adjacent, or an extent of several varies."""
        first, *others = axes = tuple(sorted(extents))
        if not others:
            return ColumnAxes(axes)
        found = tuple(n for axis in axes if isinstance(n := extents[axis], int))
        return ColumnAxes(axes, found) if axes == tuple(range(first, first + len(found))) else None

    @property
    def end(self) -> int:
        """The axis after the last of the graph."""
        return max(self.axes[-1], -1) + 1

    def place(self, axis: int) -> int:
        """Axis of a program for an axis of the graph. The last one has the columns."""
        if axis in self.axes:
            return -1
        return axis - self.end + (len(self.axes) - 1 if axis < self.axes[0] else -1)

    def fit(self, shape: Sequence[object], axes: Sequence[int]) -> bool:
        """True if a shape has all columns, or extent 1 along each of their axes."""
        found = dict(zip(axes, shape, strict=False))
        here = [found.get(axis, 1) for axis in self.axes]
        return not self.extents or all(map(same, here, self.extents)) or all(same(n, 1) for n in here)

    def joined(self, t: torch.Tensor, axes: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """Tensor as programs see it, with one dimension for the columns, and its axes; None if no view of it has that,
        with contiguous columns."""
        dims = [d for d, axis in enumerate(axes) if axis in self.axes]
        if not self.extents or len(dims) < 2:
            return t, tuple(axes)
        first, last = dims[0], dims[-1]
        if tuple(axes[first : last + 1]) != self.axes[-len(dims) :]:
            return None
        wide = [d for d in dims if not same(t.shape[d], 1)]
        if not all(same(t.stride(d), math.prod(t.shape[d + 1 : last + 1])) for d in wide):
            return None
        with torch.no_grad():
            return t.flatten(first, last), (*axes[:first], self.axes[-1], *axes[last + 1 :])


NOT_ONE_DIMENSION = "are not one dimension in memory"
COLUMNS, PARTS = ColumnAxes(), ColumnAxes((0,))
"""Columns of rows along the last dimension, and of parts of such rows, which have one more axis."""
