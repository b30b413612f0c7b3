"""The by-row schedule's division of a row into chunks and pieces, and the registers that it needs."""

from dataclasses import dataclass
from functools import lru_cache

from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.contract.engine import ByRows
from graphfuse.engines.rows.by_row.knobs import ByRowKnobs
from graphfuse.engines.rows.limits import WARP, has_own_pairs
from graphfuse.engines.rows.split import Split, chunked, phase_plan
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.steps import Join

# Registers of a thread that may hold values of a row, by threads per CTA. The register file has 64 or 128 for each
# thread, of which the rest of the kernel needs 40 to 50 without spilling. Smaller CTAs gain nothing by more than 64.
_HELD_REGISTERS = {1024: 16, 512: 40}
_MOST_HELD = 64
ROW_REGISTERS = 512 * _HELD_REGISTERS[512]  # maximum of registers in which a CTA holds a row


@dataclass(frozen=True)
class ByRowSplit(Split[ByRowKnobs]):
    """Split of rows whose CTAs end.

    chunks: number of chunks of a row.
    halved: whether a chunk is too wide for one access of a tensor with rows and columns.
    registers: 32-bit registers that a thread needs for one chunk, to read it or to keep values for later phases.
    later: registers for the inputs of one chunk that later phases read.
    fits: whether one CTA can keep a row. If not, a cluster may, or the row is read and computed again in each phase.
    sums, maxima: number of places in shared memory for these reductions of a row.
    """

    facts: RowFacts
    chunk: int
    chunks: int
    halved: bool
    registers: int
    later: int
    fits: bool
    sums: int
    maxima: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, facts: RowFacts) -> "ByRowSplit":
        chunk, halved = chunked(facts)
        chunks = facts.columns // chunk
        plan = phase_plan(facts, chunk)
        # Inputs are processed when they are read, when other values need few registers.
        registers = max(1, -(-chunk * max(plan.held_bytes, plan.read_bytes(0, True) // 2) // 4))
        read_later = sum(plan.read_bytes(p, whole) for p in plan.phases[1:] for whole in (True, False))
        later = -(-chunk * read_later // 4)
        fits = -(-chunks // 512) * 512 * registers <= ROW_REGISTERS
        counts = [[len(facts.program.reduced_after(phase, join)) for phase in plan.phases] for join in Join]
        sums, maxima = (max(of) * sum(map(bool, of)) for of in counts)
        # Phases alternate between two places for sums; for maxima each has a separate place.
        sums = min(sums, 2 * max(counts[0]))
        return cls(facts, chunk, chunks, halved, registers, later, fits, sums, maxima)

    def resident(self, knobs: ByRowKnobs) -> bool:
        return self.fits or knobs.threads_per_row > knobs.threads

    def at_once(self, knobs: ByRowKnobs) -> int:
        return max(1, 8 // self.held(1, knobs))

    def per_thread(self, knobs: ByRowKnobs) -> int:
        return -(-self.chunks * self.chunk // (knobs.threads_per_row * self.piece(knobs)))

    def piece(self, knobs: ByRowKnobs) -> int:
        """Number of elements that a thread processes together: some chunks, or half of one, so that accesses of
        neighbouring threads are contiguous."""
        if self.halved and knobs.chunks == 1 < knobs.threads_per_row:
            return self.chunk // 2
        return self.chunk * knobs.chunks

    def held(self, pieces: int, knobs: ByRowKnobs, registers: int | None = None) -> int:
        """Number of registers for `pieces` pieces. registers: for a chunk."""
        return -(-pieces * self.piece(knobs) * (registers or self.registers) // self.chunk)

    def static_bytes(self, knobs: ByRowKnobs) -> int:
        each = knobs.chunks * self.sums + self.maxima
        sent = knobs.threads_per_row * each if knobs.threads_per_row > knobs.threads else 0
        return 4 * (sent + knobs.threads * each + (WARP + 4) * (self.sums + self.maxima))

    def by_rows(self, knobs: ByRowKnobs) -> ByRows:
        together = max(1, knobs.threads // knobs.threads_per_row)
        return ByRows(self.facts.rows, together, knobs.cluster, outermost=self.facts.row_extents[0])

    def resident_plan(self, knobs: ByRowKnobs) -> PhasePlan:
        piece = self.piece(knobs)
        # 16-bit values that are kept both packed and unpacked need three times their registers; long rows have too few.
        unpack_again = self.resident(knobs) and self.steps(knobs) * piece > 40
        own_pairs = has_own_pairs(self.facts.program.all_pairs, piece, knobs.threads_per_row, self.per_thread(knobs))
        return phase_plan(self.facts, piece, unpack_again=unpack_again, own_pairs=own_pairs)


def held_registers(threads: int) -> int:
    return _HELD_REGISTERS.get(threads, _MOST_HELD)
