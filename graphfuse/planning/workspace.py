"""Lays out blocks in a workspace; blocks that are not used at the same time may share memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes that a workspace, and everything placed in it by planning, is aligned to."""


@dataclass(frozen=True)
class Block:
    """Memory of so many bytes that is in use from the step `first` to the step `last`, both included."""

    first: int
    last: int
    nbytes: int

    def meets(self, other: "Block") -> bool:
        """True if both are in use at some step."""
        return self.first <= other.last and other.first <= self.last


def place(blocks: Sequence[Block], floor: int = 0) -> tuple[tuple[int, ...], int]:
    """Offset of each block, aligned and not below `floor`, and the end of the last: at least `floor`.

    Blocks that are in use at the same step do not overlap. The smallest size is as hard to find as a knapsack's. Two
    orders are tried, each block where it fits first: in the order of steps, which is the best for chains, and largest
    first, which keeps small long-lived blocks from standing in the way. The smaller result is kept, the first if equal.
    """
    numbers = range(len(blocks))
    by_step = sorted(numbers, key=lambda n: blocks[n].first)
    by_size = sorted(numbers, key=lambda n: -blocks[n].nbytes)
    return min((_first_fit(blocks, order, floor) for order in (by_step, by_size)), key=lambda found: found[1])


def _first_fit(blocks: Sequence[Block], order: Sequence[int], floor: int) -> tuple[tuple[int, ...], int]:
    offsets, done, end = [0] * len(blocks), [], floor
    for n in order:
        at = _aligned(floor)
        for low, high in sorted(
            (offsets[m], offsets[m] + blocks[m].nbytes) for m in done if blocks[n].meets(blocks[m])
        ):
            if at + blocks[n].nbytes <= low:
                break
            at = max(at, _aligned(high))
        offsets[n] = at
        done.append(n)
        end = max(end, at + blocks[n].nbytes)
    return tuple(offsets), end


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
