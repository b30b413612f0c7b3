"""The over-grid schedule, in which many CTAs share a row: support, proposals and launch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from graphfuse.base.device import Device
from graphfuse.base.wording import counted
from graphfuse.contract.engine import Launch
from graphfuse.engines.rows import by_row
from graphfuse.engines.rows.by_row.cost import is_usual
from graphfuse.engines.rows.kernel import Access
from graphfuse.engines.rows.over_grid.cost import cost
from graphfuse.engines.rows.over_grid.knobs import OverGridKnobs
from graphfuse.engines.rows.over_grid.legal import legal, malformed, unfit
from graphfuse.engines.rows.over_grid.split import OverGridSplit
from graphfuse.engines.rows.schedule import Schedule
from graphfuse.engines.rows.support import part_reasons, place_reasons, tensor_reasons
from graphfuse.patterns.rows import RowFacts

_LONG = 1 << 16  # columns; for shorter rows, more threads than those of a cluster are not faster
_SURE = 3.0  # factor between the two models' estimates above which this schedule is certainly the faster one
_BY_ROW = by_row.ByRow()


class OverGrid(Schedule[OverGridKnobs]):
    """Schedule in which many CTAs share a row. All CTAs of the grid run at the same time, and reductions are grid
    barriers."""

    knobs: ClassVar[type] = OverGridKnobs
    split = staticmethod(OverGridSplit.of)
    legal_knobs = staticmethod(legal)
    malformed = staticmethod(malformed)
    unfit = staticmethod(unfit)
    cost = staticmethod(cost)

    def pays(self, facts: RowFacts, device: Device) -> bool:
        if facts.columns < _LONG or self.refusal(facts, device) is not None:
            return False
        by_row_knobs = filter(is_usual, _BY_ROW.legal(facts, device))
        otherwise = min(map(_BY_ROW.cost(_BY_ROW.split(facts), device), by_row_knobs), default=math.inf)
        return _SURE * min(map(self.cost(self.split(facts), device), self.legal(facts, device))) <= otherwise

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        if facts.columns < _LONG or 2 * facts.rows > device.sm_count:
            rows = f"{counted(facts.rows, 'row')} of {counted(facts.columns, 'column')}"
            yield f"{facts.node}: {rows}; accepted: up to {device.sm_count // 2} of {_LONG} or more, for many CTAs each"
        yield from place_reasons(facts)
        misfit = self.misfit(facts)
        if misfit:
            yield f"{facts.node}: {misfit}"
        yield from tensor_reasons(facts)
        yield from part_reasons(facts, OverGridSplit.of(facts).piece)
        if not self.legal(facts, device):
            yield f"{facts.node}: no way to spread rows of {facts.columns} columns over the CTAs of {device}"

    def of_any_rows(self, facts: RowFacts) -> RowFacts:
        return facts  # the CTAs of all rows run at the same time

    def misfit(self, facts: RowFacts) -> str | None:
        if facts.program.sums:
            return "ctas_per_row, for sums over rows; accepted: reductions of rows alone"
        if not facts.program.last:
            return "ctas_per_row, for rows that are not reduced; accepted: rows that are, for which CTAs meet"
        return next(place_reasons(facts), None)

    def constants(self, split: OverGridSplit, knobs: OverGridKnobs) -> Mapping[str, bool | int | Access]:
        # Reading ahead needs registers, which many threads with several passes do not have.
        ahead = knobs.threads_per_sm <= 512 or split.steps(knobs) * split.piece <= 16
        return {
            "THREADS_PER_ROW": knobs.threads_per_row,
            "CTAS_PER_SM": knobs.ctas_per_sm,
            "COLUMN_READS": Access.READ_ONLY if ahead else Access.USUAL,
            "ROW_READS": Access.USUAL if split.resident(knobs) else Access.LAST,
        }

    def launch(self, facts: RowFacts, knobs: OverGridKnobs) -> Launch:
        made = super().launch(facts, knobs)
        return replace(made, scratch_bytes=OverGridSplit.of(facts).partial_bytes(knobs), cooperative=True)
