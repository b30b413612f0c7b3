"""How rows and their columns are spread over threads, and how memory is accessed."""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.device import Device

MOST_GROUPS = 64


@dataclass(frozen=True)
class AcrossKnobs:
    """How rows and their columns are spread over threads. None of them changes a bit of the result.

    threads_across: of a CTA, side by side along the rows, each with as many rows as an access has; a power of two.
    groups: of so many threads, among which the chunks of a row are dealt out; a power of two, or one for each chunk.
    ctas_per_sm: that an SM has registers for. eviction: what the L2 gives up; 0 as usual, 1 rows that were read last of
    all, 2 rows that were read or written first (``by_row.knobs.EVICTIONS``).
    """

    threads_across: int
    groups: int
    ctas_per_sm: int = 1
    eviction: int = 0

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.threads_across * self.groups

    @property
    def places(self) -> int:
        """Groups and those that are left out, a power of two: every so many chunks are one group's."""
        return 1 << (self.groups - 1).bit_length()

    @property
    def spread(self) -> tuple[int, int]:
        """The way to spread rows."""
        return self.threads_across, self.groups


def every_knob(chunks: int, device: Device, eviction: int = 0) -> Iterator[AcrossKnobs]:
    groups = {1 << k for k in range(MOST_GROUPS.bit_length()) if 1 << k < chunks} | {chunks} & {*range(MOST_GROUPS + 1)}
    for threads_across in (4, 8, 16, 32, 64, 128, 256):
        for count in sorted(groups):
            for ctas in (1, 2, 3, 4, 5, 6, 8, 12, 16):
                if ctas * threads_across * count <= device.threads_per_sm:
                    yield AcrossKnobs(threads_across, count, ctas, eviction)
