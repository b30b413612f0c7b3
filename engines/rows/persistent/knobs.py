"""Knobs of the persistent schedule: how rows are spread over threads, and how many rows are prefetched."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PersistentKnobs:
    """Knobs that spread rows over threads. None of them changes a bit of results with rows. Sums over rows depend on
    all knobs but stages and delay, and have the same bits in every run.

    threads_per_row, threads (of a CTA): powers of two. If a row has more threads than a CTA, a cluster of CTAs shares
    it. stages: number of rows of each thread in shared memory, of which all but one are prefetched; 1 for no prefetch.
    ctas_per_sm: number of CTAs that an SM has registers and shared memory for. ctas: maximum number of CTAs of the
    grid. delay: number of rows by which the second phase follows the first, 0 or 1; with 1, one row less is prefetched.
    """

    threads_per_row: int
    threads: int
    stages: int
    ctas_per_sm: int
    ctas: int
    delay: int = 0

    @property
    def cluster(self) -> int:
        """CTAs that share a row."""
        return max(1, self.threads_per_row // self.threads)

    @property
    def rows_per_cta(self) -> int:
        """Number of rows that a CTA, or a cluster, processes at a time."""
        return max(1, self.threads // self.threads_per_row)

    @property
    def spread(self) -> tuple[int, int]:
        """The knobs that decide how rows are spread."""
        return self.threads_per_row, self.threads
