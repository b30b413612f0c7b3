"""How rows are divided into what threads take together: the part that all schedules share."""

import abc
import math
from typing import Generic, TypeVar

from graphfuse.codegen.phase_plan import ACCESS, PhasePlan
from graphfuse.contract.engine import ByRows
from graphfuse.patterns.rows import RowFacts

KnobsT = TypeVar("KnobsT")

CHUNK = 8
"""Elements of a row that are summed before all else; of other rows, what divides them."""


def chunked(facts: RowFacts) -> tuple[int, bool]:
    """Elements of a chunk, and whether it is too wide for one access of what is read and written whole."""
    chunk = math.gcd(facts.columns, CHUNK)
    whole = (*facts.program.read_whole, *facts.program.written_whole)
    return chunk, chunk == CHUNK and max((view.dtype.nbytes(chunk) for view in whole), default=0) > ACCESS


class Split(abc.ABC, Generic[KnobsT]):
    """Split of rows over threads, from facts alone.

    facts: rows and columns as the kernel takes them. chunk: elements of a row that are summed before all else.
    """

    facts: RowFacts
    chunk: int

    @abc.abstractmethod
    def resident(self, knobs: KnobsT) -> bool:
        """True if threads have registers for all that they take of rows."""

    @abc.abstractmethod
    def taken(self, knobs: KnobsT) -> int:
        """Pieces, or chunks, of a row that each thread takes."""

    @abc.abstractmethod
    def resident_plan(self, knobs: KnobsT) -> PhasePlan:
        """Phase plan of which a thread keeps what later phases need."""

    @abc.abstractmethod
    def by_rows(self, knobs: KnobsT) -> ByRows:
        """The grid for each number of rows."""

    @abc.abstractmethod
    def static_bytes(self, knobs: KnobsT) -> int:
        """Shared memory of a CTA that the kernel declares, at most."""

    def at_once(self, knobs: KnobsT) -> int:
        """Number of pieces that a thread has registers for where rows are not resident."""
        return 1

    def passes(self, knobs: KnobsT) -> int:
        """Number of passes in which a thread takes what it has registers for, a power of two."""
        if self.resident(knobs):
            return 1
        return 1 << (-(-self.taken(knobs) // self.at_once(knobs)) - 1).bit_length()

    def steps(self, knobs: KnobsT) -> int:
        """Pieces that each thread takes in one pass."""
        return -(-self.taken(knobs) // self.passes(knobs))

    def plan(self, knobs: KnobsT) -> PhasePlan:
        """Phase plan that is printed and passed."""
        plan = self.resident_plan(knobs)
        return plan if self.resident(knobs) else plan.read_again()
