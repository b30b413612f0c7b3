"""How rows are spread over the threads of persistent CTAs, and how many rows are prefetched."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PersistentKnobs:
    """Knobs that spread rows over threads. None of them changes a bit of what is written of rows; sums over rows depend
    on all but stages and delay, and are the same in every run.

    threads_per_row, threads (a CTA): powers of two; rows of more threads than a CTA has are spread over a
    cluster of CTAs. stages: rows that each thread has room for in shared memory, into which all but one are copied
    ahead; 1 to copy none. ctas_per_sm: that an SM has registers and shared memory for. ctas: of the grid, at most.
    delay: rows by which the second phase is behind the first, 0 or 1; one is copied ahead less then.
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
        """Rows that a CTA takes at a time, or a cluster."""
        return max(1, self.threads // self.threads_per_row)

    @property
    def spread(self) -> tuple[int, int]:
        """The way to spread rows."""
        return self.threads_per_row, self.threads
