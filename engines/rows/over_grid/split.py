"""The over-grid schedule's division of a row into chunks and pieces, and the registers that it needs."""

from dataclasses import dataclass
from functools import lru_cache

from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.contract.engine import ByRows
from graphfuse.engines.rows.by_row.split import held_registers
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.over_grid.knobs import OverGridKnobs
from graphfuse.engines.rows.split import Split, chunked, phase_plan
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.steps import Join

_READERS = 8  # maximum number of warps that read the partial results of a row's CTAs
_PLACES = 2  # places for partial results, which alternate between phases
_UNPACKED = 40  # elements above which a thread has registers for 16-bit values only packed, not unpacked as well


@dataclass(frozen=True)
class OverGridSplit(Split[OverGridKnobs]):
    """Split of long rows over many CTAs.

    piece: number of elements that a thread processes together, a chunk, or half of one that is too wide for an access.
    held, read: registers of a thread for a piece that it holds in all phases, and for one that a phase reads.
    sums, maxima: maximum number of these reductions of a row after one phase.
    """

    facts: RowFacts
    chunk: int
    piece: int
    held: int
    read: int
    sums: int
    maxima: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, facts: RowFacts) -> "OverGridSplit":
        chunk, halved = chunked(facts)
        piece = chunk // 2 if halved else chunk
        plan = phase_plan(facts, piece, scratch=True)
        read = max(plan.read_again().read_bytes(phase, True) for phase in plan.phases)
        # Inputs are processed when they are read, when other values need few registers.
        held = max(plan.held_bytes, plan.read_bytes(0, True) // 2)
        registers = (max(1, -(-piece * nbytes // 4)) for nbytes in (held, read))
        most = (max(len(facts.program.reduced_after(phase, join)) for phase in plan.phases) for join in Join)
        return cls(facts, chunk, piece, *registers, *most)

    def resident(self, knobs: OverGridKnobs) -> bool:
        return self.per_thread(knobs) * self.held <= held_registers(knobs.threads_per_sm)

    def at_once(self, knobs: OverGridKnobs) -> int:
        return max(1, held_registers(knobs.threads_per_sm) // self.read)

    def per_thread(self, knobs: OverGridKnobs) -> int:
        return -(-self.facts.columns // (knobs.threads_per_row * self.piece))

    def resident_plan(self, knobs: OverGridKnobs) -> PhasePlan:
        unpack_again = self.resident(knobs) and self.steps(knobs) * self.piece > _UNPACKED
        return phase_plan(self.facts, self.piece, unpack_again=unpack_again, scratch=True)

    def static_bytes(self, knobs: OverGridKnobs) -> int:
        readers = min(_READERS, knobs.ctas_per_row, knobs.threads // WARP)
        return 4 * (self.sums + self.maxima) * (knobs.threads + readers * WARP)

    def by_rows(self, knobs: OverGridKnobs) -> ByRows:
        return ByRows(self.facts.rows, 1, knobs.ctas_per_row, outermost=self.facts.row_extents[0])

    def partial_bytes(self, knobs: OverGridKnobs) -> int:
        """Bytes of scratch memory for the partial results of all CTAs' lanes. Fewer rows need fewer bytes."""
        return 4 * _PLACES * (self.sums + self.maxima) * WARP * knobs.ctas_per_row * self.facts.rows
