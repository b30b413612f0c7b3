"""Where the elements of a ragged tensor lie: one whose batches begin at offsets of their own.

Extents are [batch, heads, rows, columns]. A batch has as many rows as there is room for up to where the next begins,
and as the extents say at most.
"""

import math
from dataclasses import dataclass

Shape = tuple[int, ...]

BATCH, HEADS, ROWS, COLUMNS = range(4)
"""Axes."""


def span(dim: Shape, stride: Shape) -> int:
    """Elements from the first to one past the last, with all rows that there may be one behind another."""
    dim = (1, dim[HEADS], dim[BATCH] * dim[ROWS], dim[COLUMNS])
    return 0 if 0 in dim else 1 + sum((e - 1) * s for e, s in zip(dim[HEADS:], stride[HEADS:], strict=True))


@dataclass(frozen=True)
class Places:
    """Places of elements in memory. In place of a row that a batch does not have stands another that is there, so how
    much is read and written does not depend on the offsets.

    piece: elements that lie together wherever batches begin.
    index: of each piece taken, from the first of the memory.
    of: its batch, head, row and number in the row, each along its axes.
    rows: of each batch.
    """

    piece: int
    index: object
    of: tuple[object, ...]
    rows: object

    def read(self, memory: object):
        """The elements; of rows that a batch does not have, others."""
        return self._pieces(memory)[self.index].flatten(-2)

    def _pieces(self, memory: object):
        return memory[: memory.numel() // self.piece * self.piece].unflatten(0, (-1, self.piece))

    def write(self, memory: object, values: object) -> None:
        """Puts the rows that each batch has in place. Nothing else is written."""
        if memory.device.type == "cpu" and not self.rows.any():
            return
        pieces = self._pieces(memory)
        taken = values.unflatten(-1, (-1, self.piece))[self.of]
        pieces[self.index] = taken.where(self.rows.amax() > 0, pieces[self.index])


def rows(stride: Shape, offsets: object, multiplier: int):
    """Rows up to where the next batch begins, of each batch. offsets: as of `places`."""
    return (offsets.flatten().long() * multiplier).diff() // stride[ROWS]


def places(torch, dim: Shape, stride: Shape, offsets: object, multiplier: int) -> Places:
    """offsets: where batches begin, and where the last ends, in units of `multiplier` elements."""
    # Indices of elements would be more bytes than the elements.
    apart = multiplier, stride[HEADS], stride[ROWS], dim[COLUMNS]
    piece = math.gcd(*apart) if stride[COLUMNS] == 1 else 1
    starts = offsets.reshape(-1, 1, 1, 1).long() * (multiplier // piece)
    there = rows(stride, offsets, multiplier).clamp(0, dim[ROWS]).reshape(-1, 1, 1, 1)

    extents = (*dim[:COLUMNS], dim[COLUMNS] // piece)
    steps = (*(s // piece for s in stride[:COLUMNS]), stride[COLUMNS])

    def along(axis: int):
        return torch.arange(extents[axis], device=starts.device).reshape([-1 if a == axis else 1 for a in range(4)])

    batch = torch.where(there > 0, along(BATCH), there.argmax(dim=BATCH, keepdim=True))
    last = there[batch.flatten()] - 1
    row = torch.minimum(along(ROWS), last.clamp(min=0))
    of = batch, along(HEADS), row, along(COLUMNS)
    within = sum(number * steps[axis] for axis, number in enumerate(of) if axis != BATCH)
    index = starts[batch.flatten()] + within
    return Places(piece, index.clamp(0, max(span(dim, stride) // piece - 1, 0)), of, there)
