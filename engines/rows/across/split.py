"""The across schedule's division of rows into chunks and pieces, and the registers that it needs."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from graphfuse.codegen.phase_plan import ACCESS, PhasePlan, access
from graphfuse.contract.engine import ByRows
from graphfuse.engines.rows.across.axes import contiguous_axis, varying, with_axis_last
from graphfuse.engines.rows.across.knobs import AcrossKnobs
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.split import CHUNK, Split
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.steps import Chain, Join, Load, Operand
from graphfuse.rows.views import View

_REGISTERS, _MOST_REGISTERS = 16384, 255  # of a quarter of an SM, which its warps share; of a thread
# Registers of a thread in addition to those for its elements: in any case, for each tensor with rows and columns, for
# every 4 bytes of a piece that is computed, and to read rows again. With so many registers, ptxas does not spill for
# any program that the tests compile.
_OTHERWISE, _ADDRESS, _WRITTEN, _AGAIN = 4, 4, 5, 8


@dataclass(frozen=True)
class AcrossSplit(Split[AcrossKnobs]):
    """Split of neighbouring rows.

    facts: with the axis of contiguous elements last. piece: number of rows that a thread processes together, of each
    column. chunks: number of chunks of a row. outermost: whether the first row axis is that of the original facts, so
    that another number of rows changes only its extent.
    """

    facts: RowFacts
    piece: int
    chunk: int
    chunks: int
    outermost: bool

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, facts: RowFacts) -> "AcrossSplit":
        """The split for these facts. Raises ValueError if elements are contiguous along no row axis."""
        axis = contiguous_axis(facts)
        if axis is None:
            raise ValueError(f"{facts.node}: no row axis along which elements are neighbours")
        ordered = with_axis_last(facts, axis)
        views = [view for _, view in varying(ordered)]
        widest = max((v.dtype.nbytes(1) for v in ordered.program.read_whole), default=1)
        piece = math.gcd(ordered.row_extents[-1], ACCESS // widest, *(_aligned(v) for v in views))
        chunk = math.gcd(facts.columns, CHUNK)
        return cls(ordered, piece, chunk, facts.columns // chunk, axis > 0)

    def resident(self, knobs: AcrossKnobs) -> bool:
        return self.registers(self.per_thread(knobs), 1) <= available(knobs)

    def per_thread(self, knobs: AcrossKnobs) -> int:
        return -(-self.chunks // knobs.places)

    def registers(self, steps: int, passes: int) -> int:
        """Estimated number of registers of a thread."""
        need = self._needs[passes > 1]
        registers = max(steps * need.first, steps * need.kept + need.later)
        each = self.piece * (need.per_row + need.joined * (steps + passes.bit_length() - 1))
        return -(-self.chunk * self.piece * registers // 4) + each + need.otherwise

    @cached_property
    def _needs(self) -> tuple["_Need", "_Need"]:
        """Needs of registers for resident rows, and for rows that are read again."""
        return self._need(self._resident_plan), self._need(self._resident_plan.read_again())

    def _need(self, plan: PhasePlan) -> "_Need":
        program, kept = plan.program, plan.held_bytes
        whole = len(program.read_whole) + len(program.written_whole)
        columns = self.chunk * max(len(plan.reads(phase, False)) for phase in plan.phases)
        written = max((view.dtype.nbytes(self.piece) for view in program.written_whole), default=0)
        return _Need(
            kept,
            max(kept, plan.read_bytes(0, True)),
            max((plan.read_bytes(phase, True) for phase in plan.phases[1:]), default=0),
            len(_per_row(plan)),
            max(sum(len(program.reduced_after(phase, join)) for join in Join) for phase in plan.phases),
            columns + _OTHERWISE + _ADDRESS * whole + -(-_WRITTEN * written // 4) + _AGAIN * (not plan.resident),
        )

    def resident_plan(self, knobs: AcrossKnobs) -> PhasePlan:
        return self._resident_plan

    @cached_property
    def _resident_plan(self) -> PhasePlan:
        facts = self.facts
        return PhasePlan(facts.program, facts.row_extents, facts.columns, self.piece, True, across=True)

    def static_bytes(self, knobs: AcrossKnobs) -> int:
        rows = knobs.threads_across * self.piece
        return 4 * rows * (knobs.groups + 1) if knobs.groups > 1 else WARP

    @property
    def serves_fewer(self) -> bool:
        """True if a launch can serve fewer positions of the first row axis. A single axis is divided into pieces."""
        return self.outermost and len(self.facts.row_extents) > 1

    def by_rows(self, knobs: AcrossKnobs) -> ByRows:
        together = knobs.threads_across * self.piece
        return ByRows(self.facts.rows, together, outermost=self.facts.row_extents[0])


@dataclass(frozen=True)
class _Need:
    """Data from which the number of a thread's registers is estimated."""

    kept: int  # bytes per element that are kept between phases
    first: int  # bytes per element in the first phase
    later: int  # maximum of bytes per element that a later phase reads
    per_row: int  # number of values per row
    joined: int  # number of values per row that are reduced at the same time
    otherwise: int  # registers that do not depend on the number of elements


def available(knobs: AcrossKnobs) -> int:
    """Number of registers that a thread can have. The hardware allocates them in units of 8 per thread."""
    warps = -(-knobs.threads * knobs.ctas_per_sm // (4 * WARP))
    return min(_MOST_REGISTERS, _REGISTERS // (warps * WARP) // 8 * 8)


def _aligned(view: View) -> int:
    """Number of rows that an access can have; 0 for any number, as tensors that allow the widest access can have
    several."""
    widest = access(view, ACCESS, across=True)
    return 0 if widest == ACCESS or not view.row_strides[-1] else max(1, widest // view.dtype.nbytes(1))


def _per_row(plan: PhasePlan) -> frozenset[Operand]:
    """Values with one number per row that elementwise steps read."""
    program = plan.program
    read = (o for step in program.elementwise for _, o in step.operands if isinstance(o, Chain | Load))
    return frozenset(o for o in read if not program.extent(o).columns)
