"""``Split``: the interface of a division of rows into chunks and pieces for threads, which all schedules share."""

import abc
import math
from functools import lru_cache
from typing import Generic, TypeVar

from graphfuse.codegen.phase_plan import ACCESS, PhasePlan
from graphfuse.contract.engine import ByRows
from graphfuse.patterns.rows import RowFacts

KnobsT = TypeVar("KnobsT")

CHUNK = 8
"""Number of elements in the chunks of a row's sum, which are summed first. If it does not divide a row, chunks are
smaller."""


def chunked(facts: RowFacts) -> tuple[int, bool]:
    """Number of elements of a chunk, and whether it is too wide for one access of a tensor with rows and columns."""
    chunk = math.gcd(facts.columns, CHUNK)
    whole = (*facts.program.read_whole, *facts.program.written_whole)
    return chunk, chunk == CHUNK and max((view.dtype.nbytes(chunk) for view in whole), default=0) > ACCESS


@lru_cache(maxsize=1024)
def phase_plan(facts: RowFacts, piece: int, **options: int) -> PhasePlan:
    """Phase plan of resident rows, which is cached. options: other fields of ``PhasePlan``."""
    return PhasePlan(facts.program, facts.row_extents, facts.columns, piece, resident=True, **options)


class Split(abc.ABC, Generic[KnobsT]):
    """Split of rows over threads. It depends only on facts.

    facts: with rows and columns in the order of the kernel. chunk: number of elements of a row that are summed first.
    """

    facts: RowFacts
    chunk: int

    @abc.abstractmethod
    def resident(self, knobs: KnobsT) -> bool:
        """True if threads have enough registers for their parts of rows."""

    @abc.abstractmethod
    def per_thread(self, knobs: KnobsT) -> int:
        """Number of pieces, or chunks, of a row for each thread."""

    @abc.abstractmethod
    def resident_plan(self, knobs: KnobsT) -> PhasePlan:
        """Phase plan in which a thread keeps the values that later phases need."""

    @abc.abstractmethod
    def by_rows(self, knobs: KnobsT) -> ByRows:
        """The grid as a function of the number of rows."""

    @abc.abstractmethod
    def static_bytes(self, knobs: KnobsT) -> int:
        """Upper bound of the bytes of shared memory that the kernel declares for a CTA."""

    def at_once(self, knobs: KnobsT) -> int:
        """Number of pieces that a thread has registers for if rows are not resident."""
        return 1

    def passes(self, knobs: KnobsT) -> int:
        """Number of passes over a thread's pieces, of as many as it has registers for; a power of two."""
        if self.resident(knobs):
            return 1
        return 1 << (-(-self.per_thread(knobs) // self.at_once(knobs)) - 1).bit_length()

    def steps(self, knobs: KnobsT) -> int:
        """Number of pieces of each thread in one pass."""
        return -(-self.per_thread(knobs) // self.passes(knobs))

    def plan(self, knobs: KnobsT) -> PhasePlan:
        """Phase plan of the generated kernel and its arguments."""
        plan = self.resident_plan(knobs)
        return plan if self.resident(knobs) else plan.read_again()
