"""Places blocks in a workspace. Blocks that are not used at the same time may share memory. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Alignment in bytes of a workspace and of all blocks that planning places in it."""


@dataclass(frozen=True)
class Block:
    """Memory of `nbytes` bytes that is in use from the step `first` to the step `last`, both included."""

    first: int
    last: int
    nbytes: int

    def meets(self, other: "Block") -> bool:
        """True if both are in use at some step."""
        return self.first <= other.last and other.first <= self.last


def place(blocks: Sequence[Block], floor: int = 0) -> tuple[tuple[int, ...], int]:
    """Offset of each block, aligned and at least `floor`, and the end of the last block, at least `floor`.

    Blocks that are in use at the same step do not overlap. Finding the smallest size is NP-hard, so first fit is tried
    with two orders: by steps, which is best for chains, and largest first, which prevents fragmentation by small
    long-lived blocks. The smaller result is returned, the first if equal.
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
