"""How rows are spread over threads, and how memory is accessed."""

from dataclasses import dataclass

from graphfuse.engines.rows.kernel import Access


@dataclass(frozen=True)
class ByRowKnobs:
    """Knobs that spread rows over threads. None of them changes a bit of the result.

    threads_per_row, threads (a CTA): powers of two; rows of more threads than a CTA has are spread over a
    cluster of CTAs. chunks: how many neighbouring chunks of a row, of 8 elements, a thread takes together,
    a power of two; 1 is half a chunk where one is too wide for an access and rows have several threads.
    eviction: what the L2 gives up; 0 as usual, 1 rows that were read last of all, 2 rows that were read or
    written first. ahead: 1 to read all before the first reduction, so that nothing is awaited after it; 0 if it
    takes few registers.
    """

    threads_per_row: int
    threads: int
    chunks: int = 1
    eviction: int = 0
    ahead: int = 0

    @property
    def cluster(self) -> int:
        """CTAs that share a row."""
        return max(1, self.threads_per_row // self.threads)


EVICTIONS = (
    {},
    {"ROW_READS": Access.LAST},
    {"ROW_READS": Access.FIRST, "ROW_WRITES": Access.FIRST},
)
"""By the knob, how rows are accessed: constants of the kernel that are not as usual."""
AS_USUAL, READS_LAST, ALL_FIRST = range(len(EVICTIONS))
