"""Knobs of the by-row schedule: how rows are spread over threads, and how memory is accessed."""

from dataclasses import dataclass

from graphfuse.engines.rows.kernel import Access


@dataclass(frozen=True)
class ByRowKnobs:
    """Knobs that spread rows over threads. None of them changes a bit of the result.

    threads_per_row, threads (of a CTA): powers of two. If a row has more threads than a CTA, a cluster of CTAs shares
    it. chunks: number of consecutive chunks of 8 elements of a row that a thread processes together, a power of two. 1
    means half a chunk if a chunk is too wide for an access and a row has several threads. eviction: priority of rows in
    the L2; 0: the default; 1: rows that are read are evicted last; 2: all rows are evicted first. ahead: 1 to read all
    inputs before the first reduction; with 0, inputs are read before it only if that needs few registers.
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
"""Constants of the kernel for the access of rows, by the value of the knob `eviction`."""
AS_USUAL, READS_LAST, ALL_FIRST = range(len(EVICTIONS))
