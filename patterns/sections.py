"""`Section`, a tensor that has some or all rows of a match."""

from dataclasses import dataclass, replace

from graphfuse.op_graph.ir import FrozenTensor
from graphfuse.rows.pairs import COLUMNS, EachColumn
from graphfuse.rows.views import ROWS, Indexed, OfRank, Place, RankGroup, Within


@dataclass(frozen=True)
class Section:
    """A tensor that has some or all rows of a match, with its strides along the match's axes."""

    tensor: FrozenTensor
    place: Place = ROWS  # in terms of axes of the match and tensors of row numbers
    offset: int = 0  # elements from the tensor's first
    unit: EachColumn = COLUMNS  # as in ``View``

    def within(self, axis: int, first: int, end: int, extent: int) -> "Section":
        """The section limited to the rows from first to end - 1 along an axis. extent: of that axis in the match."""
        dim = list(self.tensor.dim)
        dim[axis] = extent  # so that the layout uses its stride
        place = self.place.only(Within(axis, first, end))
        return replace(self, tensor=replace(self.tensor, dim=tuple(dim)), place=place)

    def chosen(self, numbers: FrozenTensor) -> "Section":
        """The section with its rows, along the first axis, chosen by number."""
        (count, *dim), (stride, *strides) = self.tensor.dim, self.tensor.stride
        first = replace(self.tensor, dim=(1, *dim), stride=(0, *strides))
        return replace(self, tensor=first, place=Indexed(numbers.id, stride, count))

    def of_ranks(self, group: RankGroup) -> "Section":
        """The section on the first of several ranks. ``over_ranks`` then reads the sum of all, or writes to all."""
        return replace(self, place=OfRank(group, 0))

    def sliced(self, dim: tuple[int, ...], starts: tuple[int, ...], steps: tuple[int, ...]) -> "Section":
        """The section of a slice of its tensor. dim: extents of the slice. starts, steps: of each axis."""
        stride = self.tensor.stride
        offset = self.offset + sum(a * s for a, s in zip(stride, starts, strict=True))
        stride = tuple(a * s for a, s in zip(stride, steps, strict=True))
        return replace(self, tensor=replace(self.tensor, dim=dim, stride=stride), offset=offset)
