"""`Axes`, the axes of rows and of columns of a match."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, TensorId
from graphfuse.ops import aligned


@dataclass(frozen=True)
class Axes:
    """Axes of rows and of columns of the tensor that a match normalizes. dim: its extents. columns: axes of columns."""

    graph: FrozenGraph
    dim: tuple[int, ...]
    columns: tuple[int, ...]
    sums: bool  # whether the node makes sums over all rows, so that nothing else may be reduced

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.columns))
        return f"rows along {'axes' if len(self.columns) > 1 else 'axis'} {axes} of {list(self.dim)}"

    def tensor(self, t: TensorId) -> FrozenTensor:
        """A tensor of the graph as ``in_row_axes``."""
        return self.in_row_axes(self.graph.tensors[t])

    def in_row_axes(self, t: FrozenTensor) -> FrozenTensor:
        """A tensor in terms of the axes of `dim`. A tensor of lower rank gets leading axes of extent 1.

        A tensor with an axis of parts, and one of columns of a part, has them merged into one. Its extent is the number
        of parts if columns are `shared`."""
        more = len(self.dim) - len(t.dim)
        if more < 0 and self._has_part_axis(t):
            return _with_whole_rows(t)
        if more <= 0:
            return t
        outer = t.dim[0] * t.stride[0]
        return replace(t, dim=aligned(t.dim, len(self.dim)), stride=(*(outer,) * more, *t.stride))

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of rows."""
        return tuple(axis for axis in range(len(self.dim)) if axis not in self.columns)

    @cached_property
    def width(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.dim[axis] for axis in self.columns)

    @cached_property
    def per_row(self) -> tuple[int, ...]:
        """Extents of a tensor with one value per row."""
        return tuple(1 if axis in self.columns else extent for axis, extent in enumerate(self.dim))

    @cached_property
    def per_column(self) -> tuple[int, ...]:
        """Extents of a tensor with one value per column."""
        return tuple(extent if axis in self.columns else 1 for axis, extent in enumerate(self.dim))

    @cached_property
    def last(self) -> bool:
        """True if a row runs along the last axis alone."""
        return self.columns == (len(self.dim) - 1,)

    def has_part_axis(self, t: TensorId) -> bool:
        """True if a tensor has an additional axis, for parts of rows."""
        return self._has_part_axis(self.graph.tensors[t])

    def _has_part_axis(self, t: FrozenTensor) -> bool:
        return self.last and len(t.dim) == len(self.dim) + 1

    def part(self, t: TensorId) -> int:
        """Columns of a part, if a tensor has all parts of all rows; 0 otherwise."""
        return self.graph.tensors[t].dim[-1] if self.has_part_axis(t) and self.tensor(t).dim == self.dim else 0

    def shared(self, t: TensorId) -> int:
        """Columns of a part, if a tensor has one element per part; 0 otherwise."""
        *_, count, columns = (0, *self.graph.tensors[t].dim)
        is_one = columns == 1 <= count < self.width and self.width % count == 0
        # A row may be one part. Scalars that broadcast have this shape, too, but no node makes them.
        is_shared = self.has_part_axis(t) and is_one and (count > 1 or t in self.graph.producer)
        return self.width // count if is_shared else 0

    def repeated(self, t: TensorId) -> int:
        """Columns of a part, if a tensor has the columns of one part, the same for all; 0 otherwise."""
        *_, count, columns = (0, *self.graph.tensors[t].dim)
        is_repeated = self.has_part_axis(t) and count == 1 < columns < self.width and self.width % columns == 0
        return columns if is_repeated else 0

    def of_all_parts(self, t: TensorId) -> bool:
        """True if a tensor with an axis of parts has one part, which broadcasts to all."""
        return self.has_part_axis(t) and self.graph.tensors[t].dim[-2] == 1

    def has_rows(self, t: TensorId) -> bool:
        """True if ``in_row_axes`` can give a tensor the axes of `dim`: if it has parts, one stride serves all
        columns."""
        return len(self.tensor(t).dim) == len(self.dim)

    def whole(self, t: TensorId) -> bool:
        """True if a tensor has the extents `dim`: all columns of all rows."""
        return self.graph.tensors[t].dim == self.dim

    def has_all(self, t: TensorId) -> bool:
        """True if a tensor has all columns of all rows, perhaps with an axis of parts."""
        return self.whole(t) or self.part(t) > 0

    def fits(self, t: TensorId) -> bool:
        """True if a tensor broadcasts to the rows: along all columns, all of each part, all parts, or none."""
        dim = self.tensor(t).dim
        if self.shared(t) or self.repeated(t):
            dim = (*dim[:-1], 1)
        if len(dim) != len(self.dim) or any(e not in (1, x) for e, x in zip(dim, self.dim, strict=True)):
            return False
        return len({dim[axis] == self.dim[axis] for axis in self.columns if self.dim[axis] != 1}) <= 1


def _with_whole_rows(t: FrozenTensor) -> FrozenTensor:
    """A tensor with its last two axes merged; unchanged if no single stride serves both."""
    (count, columns), (apart, stride) = t.dim[-2:], t.stride[-2:]
    if 1 not in (count, columns) and apart != columns * stride:
        return t
    return replace(t, dim=(*t.dim[:-2], count * columns), stride=(*t.stride[:-2], apart if columns == 1 else stride))
