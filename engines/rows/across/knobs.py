"""How rows and their columns are spread over threads, and how memory is accessed."""

from dataclasses import dataclass

MOST_GROUPS = 64


@dataclass(frozen=True)
class AcrossKnobs:
    """Knobs that spread rows and their columns over threads. None of them changes a bit of the result.

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
        """Threads of a CTA."""
        return self.threads_across * self.groups

    @property
    def places(self) -> int:
        """Groups and those that are left out, a power of two: every so many chunks are one group's."""
        return 1 << (self.groups - 1).bit_length()

    @property
    def spread(self) -> tuple[int, int]:
        """The way to spread rows."""
        return self.threads_across, self.groups
