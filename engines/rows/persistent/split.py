"""The persistent schedule's division of a row into chunks and pieces, and the registers and memory that it needs."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from graphfuse.codegen.copies import copies
from graphfuse.codegen.phase_plan import ACCESS, LIGHT, PhasePlan
from graphfuse.contract.engine import ByRows
from graphfuse.engines.rows.kernel import overwritable
from graphfuse.engines.rows.limits import WARP, has_own_pairs
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs
from graphfuse.engines.rows.split import CHUNK, Split, phase_plan
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import RANDOM
from graphfuse.rows.steps import Join

_REGISTERS = 65536  # of an SM
_MOST_REGISTERS = 255  # of a thread
_MOST_ELEMENTS = 64  # elements of a row for a thread
_USED = 0.95  # share of the registers that may be used by the estimate below
_WORK, _INPUT, _LOADED = 0.15, 0.3, 0.75  # registers per element: always, for each input, and if inputs are not copied
_DRAWN = 1.0  # registers per element for each random number
_OTHERWISE, _ADDRESS = 30, 3  # other registers: always, and for each tensor with rows, twice if it is read
_AGAIN = 512  # threads of a CTA that reads rows again in each phase
_MOST_WARPS = 16  # maximum of warps of a row if each thread reads the partial sums of all warps
_MOST_DELAYED = 32  # elements of a row for a thread, if values of the row before need registers, too
_SECTOR = 32  # bytes of the smallest memory transaction
_AT_ONCE = 2  # pieces that a thread processes together if rows are read again


@dataclass(frozen=True)
class PersistentSplit(Split[PersistentKnobs]):
    """Split of rows for persistent CTAs.

    chunk: number of elements of a row's chunks: if there are sums over rows, at most as many as an access has of the
        narrowest input; else as in other schedules, for the same bits.
    piece: number of elements that a thread processes together, a chunk, or half of one that is too wide for an access.
    pieces: number of pieces of a row.
    kept: registers that a thread needs for each of its elements of a row, by the number of operations that are
        recomputed: for sums over rows, inputs without rows, and values that are kept between phases.
    piece_bytes, value_bytes: bytes that a thread prefetches for each piece and for each row.
    copies_all: whether all inputs with rows and columns are prefetched.
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
        return self._has_registers(knobs, self.per_thread(knobs), knobs.stages > 1)

    def _has_registers(self, knobs: PersistentKnobs, pieces: int, copied: bool, light: int = LIGHT) -> bool:
        elements = pieces * self.piece
        if elements > _MOST_ELEMENTS:
            return False
        each, otherwise = self._registers[copied]
        there = min(_MOST_REGISTERS, _REGISTERS // (knobs.threads * knobs.ctas_per_sm))
        return elements * (self.kept[light] + each) + otherwise <= _USED * there

    @cached_property
    def _registers(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Registers per element in addition to `kept`, and other registers: if threads read inputs, and if these are
        prefetched."""
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
        """True if the second phase of a row can follow the first phase of the next row.

        That requires rows of several warps, whose partial sums each thread can read; prefetched inputs and no other
        kept values; and few elements per thread."""
        warps = knobs.threads_per_row // WARP
        several = 1 < warps <= _MOST_WARPS and self.per_thread(knobs) * self.piece <= _MOST_DELAYED
        two_phases = self.facts.program.last == 1 and not self.maxima
        return several and two_phases and knobs.stages > 2 and self.copies_all and not self.keeps

    def at_once(self, knobs: PersistentKnobs) -> int:
        return _AT_ONCE

    def per_thread(self, knobs: PersistentKnobs) -> int:
        return -(-self.pieces // knobs.threads_per_row)

    def resident_plan(self, knobs: PersistentKnobs) -> PhasePlan:
        pairs = self.facts.program.all_pairs
        own_pairs = has_own_pairs(pairs, self.piece, knobs.threads_per_row, self.per_thread(knobs))
        return _resident_plan(self.facts, self.piece, knobs.stages, self._light(knobs), own_pairs)

    def _light(self, knobs: PersistentKnobs) -> int:
        """Maximum number of operations that are recomputed, as few as registers allow to keep the other values.

        With a delay, no value is kept that can be recomputed, as it would be kept for two rows."""
        if knobs.delay or not self.facts.program.sums:
            return LIGHT
        copied = knobs.stages > 1
        fits = (k for k in range(LIGHT) if self._has_registers(knobs, self.per_thread(knobs), copied, k))
        return next(fits, LIGHT)

    def stage_bytes(self, knobs: PersistentKnobs) -> int:
        """Bytes of shared memory of a CTA for one prefetched row of each thread."""
        return knobs.threads * (self.steps(knobs) * self.piece_bytes + self.value_bytes)

    def dynamic_bytes(self, knobs: PersistentKnobs) -> int:
        """Bytes of dynamic shared memory of a CTA."""
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
        """Number of partial sums over rows in one access."""
        return min(4, self.piece)

    def slab(self, knobs: PersistentKnobs) -> int:
        """Number of columns whose partial sums a CTA adds at a time: at least a sector, few enough that all CTAs take
        part, and at most as many as its threads can read at once."""
        share = -(-self.facts.columns * len(self.facts.program.sums) // knobs.ctas)
        return min(max(_SECTOR // 4, 1 << (share - 1).bit_length()), knobs.threads * self.partial_vector)

    def by_rows(self, knobs: PersistentKnobs) -> ByRows:
        """Grid as a function of the number of rows. If there are sums over rows, it has at least one cluster."""
        most, least = knobs.ctas // knobs.cluster, int(bool(self.facts.program.sums))
        return ByRows(self.facts.rows, knobs.rows_per_cta, knobs.cluster, most, least, self.facts.row_extents[0])

    def partial_bytes(self, knobs: PersistentKnobs) -> int:
        """Bytes of scratch memory for the partial sums over rows of all CTAs or clusters; fewer rows need no more."""
        return self.by_rows(knobs).clusters * self.sum_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of the partial sums over rows of one CTA or cluster."""
        return self.facts.columns * 4 * len(self.facts.program.sums)


def _kept_bytes(plan: PhasePlan) -> int:
    """Bytes per element that are kept: between phases, and of inputs that are the same for all rows."""
    columns = {i for phase in plan.phases for i in plan.reads(phase, False)}
    return plan.held_bytes + sum(plan.program.inputs[i].dtype.bits // 8 for i in columns)


@lru_cache(maxsize=256)
def _resident_plan(facts: RowFacts, piece: int, stages: int, light: int, own_pairs: bool = False) -> PhasePlan:
    """Phase plan of resident rows.

    Inputs are read again where other schedules keep values, so stores that may overwrite inputs are delayed."""
    plan = phase_plan(facts, piece, stages=stages, light=light, own_pairs=own_pairs)
    late = frozenset(number for _, number in overwritable(facts).difference(plan.overwritable()))
    return replace(plan, program=replace(facts.program, late=late)) if late else plan
