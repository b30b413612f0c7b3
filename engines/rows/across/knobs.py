"""Knobs of the across schedule: how rows and columns are spread over threads, and how memory is accessed."""

from dataclasses import dataclass

MOST_GROUPS = 64


@dataclass(frozen=True)
class AcrossKnobs:
    """Knobs that spread rows and their columns over threads. None of them changes a bit of the result.

    threads_across: threads of a CTA along neighbouring rows, each with the rows of one access; a power of two. groups:
    number of groups of `threads_across` threads, which share the chunks of a row; a power of two, or one group for each
    chunk. ctas_per_sm: number of CTAs that an SM has registers for. eviction: priority of rows in the L2; 0: the
    default; 1: rows that are read are evicted last; 2: all rows are evicted first (``by_row.knobs.EVICTIONS``).
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
        """Number of groups rounded up to a power of two. The chunks of a group have this distance."""
        return 1 << (self.groups - 1).bit_length()

    @property
    def spread(self) -> tuple[int, int]:
        """The knobs that decide how rows are spread."""
        return self.threads_across, self.groups
