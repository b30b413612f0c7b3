"""What may be tuned. No knob changes a result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Knobs:
    """threads: of a CTA. steps: elements that each thread takes."""

    threads: int = 256
    steps: int = 4


ALL = tuple(Knobs(threads, steps) for threads in (256, 128, 512) for steps in (4, 1, 8))
