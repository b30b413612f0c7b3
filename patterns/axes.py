"""Which axes of a match are rows and which are columns."""

import math
from dataclasses import dataclass, replace

from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, TensorId
from graphfuse.ops import aligned


@dataclass(frozen=True)
class Axes:
    """Axes of the normalized tensor: which are rows and which are columns."""

    graph: FrozenGraph
    dim: tuple[int, ...]
    columns: tuple[int, ...]
    sums: bool  # whether the node that they are of makes sums over rows, beside which nothing else is reduced

    def tensor(self, t: TensorId) -> FrozenTensor:
        """A tensor of the graph, one of lower rank with leading axes of extent 1."""
        found = self.graph.tensors[t]
        more = len(self.dim) - len(found.dim)
        if more <= 0:
            return found
        outer = found.dim[0] * found.stride[0]
        return replace(found, dim=aligned(found.dim, len(self.dim)), stride=(*(outer,) * more, *found.stride))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of rows."""
        return tuple(axis for axis in range(len(self.dim)) if axis not in self.columns)

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.dim[axis] for axis in self.columns)

    @property
    def per_row(self) -> tuple[int, ...]:
        """Extents of a tensor with one value a row."""
        return tuple(1 if axis in self.columns else extent for axis, extent in enumerate(self.dim))

    @property
    def per_column(self) -> tuple[int, ...]:
        """Extents of a tensor with one value a column."""
        return tuple(extent if axis in self.columns else 1 for axis, extent in enumerate(self.dim))

    @property
    def last(self) -> bool:
        """True if a row runs along the last axis alone."""
        return self.columns == (len(self.dim) - 1,)

    def whole(self, t: TensorId) -> bool:
        """True if a tensor has an element for each of the rows."""
        return self.graph.tensors[t].dim == self.dim

    def fits(self, t: TensorId) -> bool:
        """True if a tensor broadcasts to the rows: along all columns or none."""
        dim = self.tensor(t).dim
        if len(dim) != len(self.dim) or any(e not in (1, x) for e, x in zip(dim, self.dim, strict=True)):
            return False
        return len({dim[axis] == self.dim[axis] for axis in self.columns if self.dim[axis] != 1}) <= 1
