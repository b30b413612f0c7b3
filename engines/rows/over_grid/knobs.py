"""Knobs of the over-grid schedule: how few long rows are spread over CTAs that run at the same time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OverGridKnobs:
    """Knobs that spread rows over CTAs. None of them changes a bit of the result.

    ctas_per_row, threads (of a CTA): powers of two. ctas_per_sm: number of CTAs that an SM has registers for.
    """

    ctas_per_row: int
    threads: int
    ctas_per_sm: int = 1

    @property
    def threads_per_row(self) -> int:
        return self.ctas_per_row * self.threads

    @property
    def threads_per_sm(self) -> int:
        return self.ctas_per_sm * self.threads

    @property
    def spread(self) -> tuple[int, int]:
        """The knobs that decide how rows are spread."""
        return self.ctas_per_row, self.threads
