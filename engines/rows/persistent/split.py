"""How a row is divided into what threads take together, and what a CTA keeps of it."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from graphfuse.codegen.copies import copies
from graphfuse.codegen.phase_plan import ACCESS, LIGHT, PhasePlan
from graphfuse.contract.engine import ByRows
from graphfuse.engines.rows.kernel import overwritable
from graphfuse.engines.rows.limits import WARP, has_own_pairs
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs
from graphfuse.engines.rows.split import CHUNK, Split
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import RANDOM
from graphfuse.rows.steps import Join

_REGISTERS = 65536  # of an SM
_MOST_REGISTERS = 255  # of a thread
_MOST_ELEMENTS = 64  # of a row, that a thread takes
_USED = 0.95  # of them, by the estimate below
_WORK, _INPUT, _LOADED = 0.15, 0.3, 0.75  # registers for what is worked on, by element: of each input, if not copied
_DRAWN = 1.0  # of each random number
_OTHERWISE, _ADDRESS = 30, 3  # and for all that does not grow with elements: of each tensor with rows, twice if read
_AGAIN = 512  # threads of a CTA that reads rows again in each phase
_MOST_WARPS = 16  # of a row, whose parts of a sum each thread reads by itself
_MOST_DELAYED = 32  # elements that a thread takes of a row, where what it knows of the row before takes registers too
_SECTOR = 32  # bytes that memory moves at least
_AT_ONCE = 2  # pieces of a row that is read again


@dataclass(frozen=True)
class PersistentSplit(Split[PersistentKnobs]):
    """Split of rows whose CTAs stay.

    chunk: what divides a row: where there are sums over rows as many as an access has of the narrowest input, else as
        many as of other schedules, for the same bits.
    piece: those that are taken together, a chunk, or half of one that is too wide for an access.
    pieces: a row's.
    kept: registers that a thread needs for each element that it takes of a row, by the operations that are done again:
        for the sums over rows, what is the same for all of them, and what is kept between phases.
    piece_bytes, value_bytes: what a thread copies ahead of each piece and of each row.
    copies_all: whether that is all that is read whole.
    """

    facts: RowFacts
    chunk: int
    piece: int
    pieces: int
    kept: tuple[float, ...]
    piece_bytes: int
    value_bytes: int
    copies_all: bool
    keeps: bool
    sums: int
    maxima: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, facts: RowFacts) -> "PersistentSplit":
        read = [view.dtype.bits // 8 for view in facts.program.read_whole] or [4]
        written = [view.dtype.bits // 8 for view in facts.program.written_whole]
        narrowest = ACCESS // min(read) if facts.program.sums else CHUNK
        chunk = math.gcd(facts.columns, CHUNK, narrowest)
        piece = math.gcd(chunk, ACCESS // max(read + written))
        plans = [_resident_plan(facts, piece, 2, light) for light in range(LIGHT + 1)]
        plan = plans[LIGHT]
        copied = copies(plan).inputs
        return cls(
            facts,
            chunk,
            piece,
            facts.columns // piece,
            tuple(len(facts.program.sums) + _kept_bytes(plan) / 4 for plan in plans),
            sum(c.nbytes for c in copied if c.pieces),
            sum(c.nbytes for c in copied if not c.pieces),
            sum(c.pieces for c in copied) == len(facts.program.read_whole)
            and not (facts.program.all_pairs or facts.program.periods),
            plan.held_bytes > 0,
            *(max(len(facts.program.reduced_after(phase, join)) for phase in plan.phases) for join in Join),
        )

    def resident(self, knobs: PersistentKnobs) -> bool:
        return self._has_registers(knobs, self.taken(knobs), knobs.stages > 1)

    def _has_registers(self, knobs: PersistentKnobs, pieces: int, copied: bool, light: int = LIGHT) -> bool:
        elements = pieces * self.piece
        if elements > _MOST_ELEMENTS:
            return False
        each, otherwise = self._registers[copied]
        there = min(_MOST_REGISTERS, _REGISTERS // (knobs.threads * knobs.ctas_per_sm))
        return elements * (self.kept[light] + each) + otherwise <= _USED * there

    @cached_property
    def _registers(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Registers of each element beside `kept`, and others: where inputs are read by each thread, and where they are
        copied."""
        program = self.facts.program
        read, written = len(program.read_whole), len(program.written_whole)
        drawn = sum(step.op_name == RANDOM for step in program.elementwise)
        each, tensors = _WORK + _INPUT * read + _DRAWN * drawn, _ADDRESS * (read + written)
        return (each + _LOADED, _OTHERWISE + 2 * tensors), (each, _OTHERWISE + tensors)

    def is_again(self, knobs: PersistentKnobs) -> bool:
        """True if the knobs are among those for rows that are read again in each phase."""
        fixed = (knobs.threads_per_row, knobs.threads, knobs.stages) == (_AGAIN, _AGAIN, 1)
        return fixed and (knobs.ctas_per_sm == 1 or self._has_registers(knobs, _AT_ONCE, copied=False))

    def can_delay(self, knobs: PersistentKnobs) -> bool:
        """True if the second phase of a row can follow the first of the next: of rows of several warps, few enough for
        each thread to read what all have come to, that are copied and of which nothing else is kept, and of which a
        thread takes few elements."""
        warps = knobs.threads_per_row // WARP
        several = 1 < warps <= _MOST_WARPS and self.taken(knobs) * self.piece <= _MOST_DELAYED
        two_phases = self.facts.program.last == 1 and not self.maxima
        return several and two_phases and knobs.stages > 2 and self.copies_all and not self.keeps

    def at_once(self, knobs: PersistentKnobs) -> int:
        return _AT_ONCE

    def taken(self, knobs: PersistentKnobs) -> int:
        return -(-self.pieces // knobs.threads_per_row)

    def resident_plan(self, knobs: PersistentKnobs) -> PhasePlan:
        own_pairs = has_own_pairs(self.facts.program.all_pairs, self.piece, knobs.threads_per_row, self.taken(knobs))
        return _resident_plan(self.facts, self.piece, knobs.stages, self._light(knobs), own_pairs)

    def _light(self, knobs: PersistentKnobs) -> int:
        """Operations, at most, that are done again: as few as there are registers for to keep the rest. Behind a delay
        nothing is kept that need not be, as it would be kept of two rows."""
        if knobs.delay or not self.facts.program.sums:
            return LIGHT
        copied = knobs.stages > 1
        fits = (k for k in range(LIGHT) if self._has_registers(knobs, self.taken(knobs), copied, k))
        return next(fits, LIGHT)

    def stage_bytes(self, knobs: PersistentKnobs) -> int:
        """Shared memory of a CTA for one row each of its threads is ahead."""
        return knobs.threads * (self.steps(knobs) * self.piece_bytes + self.value_bytes)

    def dynamic_bytes(self, knobs: PersistentKnobs) -> int:
        """Shared memory of a CTA whose size the launch gives."""
        copied = knobs.stages * self.stage_bytes(knobs) if knobs.stages > 1 else 0
        if not self.facts.program.sums:
            return copied
        joined = knobs.rows_per_cta * self.sum_bytes if knobs.rows_per_cta > 1 else 0
        slab = self.slab(knobs)
        parts = knobs.threads // max(slab // self.partial_vector, WARP)
        return max(copied, joined, 4 * parts * slab)

    def static_bytes(self, knobs: PersistentKnobs) -> int:
        sent = knobs.threads_per_row if knobs.cluster > 1 else 0
        mbarriers = 4 * (knobs.cluster > 1)
        values = self.sums + self.maxima
        return 8 * (values * (sent + knobs.threads) + mbarriers * ((self.sums > 0) + (self.maxima > 0)) + WARP * values)

    @property
    def partial_vector(self) -> int:
        """Partial sums over rows in one access."""
        return min(4, self.piece)

    def slab(self, knobs: PersistentKnobs) -> int:
        """Columns of which a CTA adds up the partial sums at a time: no less than a sector has, so many that all CTAs
        take part, and no more than threads can read at once."""
        share = -(-self.facts.columns * len(self.facts.program.sums) // knobs.ctas)
        return min(max(_SECTOR // 4, 1 << (share - 1).bit_length()), knobs.threads * self.partial_vector)

    def by_rows(self, knobs: PersistentKnobs) -> ByRows:
        """Grid by rows. Where sums over rows are written, one cluster starts at least."""
        most, least = knobs.ctas // knobs.cluster, int(bool(self.facts.program.sums))
        return ByRows(self.facts.rows, knobs.rows_per_cta, knobs.cluster, most, least, self.facts.row_extents[0])

    def partial_bytes(self, knobs: PersistentKnobs) -> int:
        """Memory in which CTAs, or clusters, leave their sums over rows: no fewer rows need more."""
        return self.by_rows(knobs).clusters * self.sum_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums over rows of one CTA, or cluster."""
        return self.facts.columns * 4 * len(self.facts.program.sums)


def _kept_bytes(plan: PhasePlan) -> int:
    """Bytes of an element that are kept: between phases, and of what is the same for all rows."""
    columns = {i for phase in plan.phases for i in plan.reads(phase, False)}
    return plan.held_bytes + sum(plan.program.inputs[i].dtype.bits // 8 for i in columns)


@lru_cache(maxsize=256)
def _resident_plan(facts: RowFacts, piece: int, stages: int, light: int, own_pairs: bool = False) -> PhasePlan:
    """Inputs are read again where other schedules keep values: what may be written
    over them is written when that is done."""
    plan = PhasePlan(
        facts.program,
        facts.row_extents,
        facts.columns,
        piece,
        resident=True,
        stages=stages,
        light=light,
        own_pairs=own_pairs,
    )
    late = frozenset(number for _, number in overwritable(facts).difference(plan.overwritable()))
    return replace(plan, program=replace(facts.program, late=late)) if late else plan
