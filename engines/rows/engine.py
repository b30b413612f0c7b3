"""``RowEngine``: the engine of row programs, which chooses a schedule for each program."""

from collections.abc import Sequence
from typing import ClassVar

from graphfuse.base import settings
from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.contract.engine import KernelEngine, Launch, No, ProblemClass
from graphfuse.contract.served import Served
from graphfuse.engines.rows.across import Across, AcrossKnobs
from graphfuse.engines.rows.by_row import ByRow, ByRowKnobs
from graphfuse.engines.rows.kernel import in_place
from graphfuse.engines.rows.notes import notes
from graphfuse.engines.rows.over_grid import OverGrid, OverGridKnobs
from graphfuse.engines.rows.persistent import Persistent, PersistentKnobs
from graphfuse.engines.rows.schedule import Schedule
from graphfuse.op_graph.ir import TensorId
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.check_program import check_program

RowKnobs = ByRowKnobs | PersistentKnobs | AcrossKnobs | OverGridKnobs

_SCHEDULES = {schedule.knobs: schedule for schedule in (ByRow(), Persistent(), Across(), OverGrid())}


class RowEngine(KernelEngine[RowFacts, RowKnobs]):
    """Runs a row program as one generated CUDA kernel, whose source does not contain the number of rows.

    Numerics: float32 throughout, unless the graph declares roundings. A sum over a row is a fixed binary tree over
    chunks of 8 elements, in which the elements of each half are added in order. Chunks have 4 elements if there are
    sums over rows and all inputs with rows and columns have 4 bytes per element. The sum has the same bits for every
    row count, knob, schedule and run, and for any outputs. The order of sums over rows depends on knobs and the number
    of rows; they have the same bits in every run. FP4 elements differ from the value before quantization by at most
    max(scale, amax - 6 * scale) of the block: half the widest gap of E2M1 (4 to 6), or the part that saturation cuts
    off if the scale was rounded down. Rounding value * (1 / scale) may add 2e-6 of that.
    """

    name: ClassVar[str] = "rows"
    facts: ClassVar[type] = RowFacts
    knobs: ClassVar[tuple[type, ...]] = tuple(_SCHEDULES)
    modes: ClassVar[frozenset[heur_mode]] = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    serves: ClassVar[Served] = Served(rounding=True, layouts=True, by_value=True)
    entry: ClassVar[str] = "row_program"

    def why_not(self, facts: RowFacts, device: Device) -> No | None:
        first = None
        for schedule in _by_preference(facts):
            reason = schedule.refusal(facts, device)
            if reason is None:
                if settings.verify():
                    check_program(facts.program)
                return None
            first = first or reason
        return No(first)

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[RowKnobs]:
        """Knobs of the schedule that is estimated to be fastest (``Schedule.pays``), else of the first that accepts the
        program. In mode B, the best knobs of the other schedules follow."""
        found: list[RowKnobs] = []
        for schedule in sorted(_by_preference(facts), key=lambda schedule: not schedule.pays(facts, device)):
            if (not found or mode is heur_mode.B) and schedule.refusal(facts, device) is None:
                found += schedule.propose(facts, device, heur_mode.A if found else mode)
        return found

    def illegal(self, facts: RowFacts, knobs: RowKnobs, device: Device) -> No | None:
        reason = _SCHEDULES[type(knobs)].illegal(facts, knobs, device)
        return None if reason is None else No(reason)

    def notes(self, facts: RowFacts, knobs: RowKnobs, device: Device) -> tuple[str, ...]:
        return tuple(notes(facts.program, device, _SCHEDULES[type(knobs)].notes(facts, knobs)))

    def in_place(self, facts: RowFacts, knobs: RowKnobs) -> tuple[tuple[TensorId, TensorId], ...]:
        return in_place(facts)

    def source(self, facts: RowFacts, knobs: RowKnobs) -> str:
        return _SCHEDULES[type(knobs)].source(facts, knobs)

    def launch(self, facts: RowFacts, knobs: RowKnobs) -> Launch:
        return _SCHEDULES[type(knobs)].launch(facts, knobs)

    def problem(self, facts: RowFacts) -> ProblemClass:
        return _by_preference(facts)[0].problem(facts)


def _by_preference(facts: RowFacts) -> list[Schedule]:
    return sorted(_SCHEDULES.values(), key=lambda schedule: not schedule.prefers(facts))
