"""Memory positions of the elements of ragged tensors, whose batches begin at given offsets.

Extents are [batch, heads, rows, columns]. A batch has as many rows as fit before the next batch begins, at most as many
as the extents have.
"""

import math
from dataclasses import dataclass

Shape = tuple[int, ...]

BATCH, HEADS, ROWS, COLUMNS = range(4)


def span(dim: Shape, stride: Shape) -> int:
    """Elements from the first to one past the last, if all batches have all rows and follow one another."""
    dim = (1, dim[HEADS], dim[BATCH] * dim[ROWS], dim[COLUMNS])
    return 0 if 0 in dim else 1 + sum((e - 1) * s for e, s in zip(dim[HEADS:], stride[HEADS:], strict=True))


@dataclass(frozen=True)
class Places:
    """Memory positions of a ragged tensor's elements, in contiguous pieces.

    A row that a batch lacks is replaced by an existing one, so the amount of memory read and written does not depend on
    the offsets.

    piece: elements that are contiguous wherever batches begin.
    index: position of each piece, counted in pieces from the start of the memory.
    of: batch, head, row and number within the row of each piece, each along its own axis.
    rows: number of rows of each batch.
    """

    piece: int
    index: object
    of: tuple[object, ...]
    rows: object

    def read(self, memory: object):
        """The elements. Rows that a batch lacks have arbitrary values."""
        return self._pieces(memory)[self.index].flatten(-2)

    def _pieces(self, memory: object):
        return memory[: memory.numel() // self.piece * self.piece].unflatten(0, (-1, self.piece))

    def write(self, memory: object, values: object) -> None:
        """Writes the rows that each batch has, and nothing else."""
        if memory.device.type == "cpu" and not self.rows.any():
            return
        pieces = self._pieces(memory)
        taken = values.unflatten(-1, (-1, self.piece))[self.of]
        pieces[self.index] = taken.where(self.rows.amax() > 0, pieces[self.index])


def rows(stride: Shape, offsets: object, multiplier: int):
    """Number of rows of each batch up to the next one. offsets: as in `places`."""
    return (offsets.flatten().long() * multiplier).diff() // stride[ROWS]


def places(torch, dim: Shape, stride: Shape, offsets: object, multiplier: int) -> Places:
    """Positions of all elements. offsets: begin of each batch and end of the last, in units of `multiplier`."""
    # Indices are of pieces: those of elements would take more bytes than the elements.
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
