"""The across schedule, whose CTAs process neighbouring rows: support, proposals and launch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.base.wording import counted
from graphfuse.contract.engine import Constant, Launch, ProblemClass, RowCount
from graphfuse.engines.rows.across.axes import contiguous_axis
from graphfuse.engines.rows.across.cost import cost, usual
from graphfuse.engines.rows.across.knobs import AcrossKnobs
from graphfuse.engines.rows.across.legal import legal, malformed, unfit
from graphfuse.engines.rows.across.split import AcrossSplit
from graphfuse.engines.rows.across.support import layout_reasons, own_reasons, row_reasons
from graphfuse.engines.rows.by_row.cost import eviction
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.kernel import Access
from graphfuse.engines.rows.problem import problem
from graphfuse.engines.rows.schedule import Schedule, best_first
from graphfuse.engines.rows.support import tensor_reasons
from graphfuse.patterns.rows import RowFacts


class Across(Schedule[AcrossKnobs]):
    """Schedule in which threads process neighbouring rows, one column after another. Results have the same bits as in
    other layouts."""

    knobs: ClassVar[type] = AcrossKnobs
    split = staticmethod(AcrossSplit.of)
    legal_knobs = staticmethod(legal)
    malformed = staticmethod(malformed)
    unfit = staticmethod(unfit)
    cost = staticmethod(cost)

    def prefers(self, facts: RowFacts) -> bool:
        return any(view.column_stride != 1 for view in facts.program.read_whole)

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        yield from own_reasons(facts)
        yield from layout_reasons(facts)
        split = AcrossSplit.of(facts)
        yield from tensor_reasons(split.facts, columns_apart=True)
        yield from row_reasons(split)
        if not self.legal(facts, device):
            rows = f"{counted(facts.rows, 'row')} of {counted(facts.columns, 'column')}"
            yield f"{facts.node}: no way to spread {rows} over threads of {device}"

    def of_any_rows(self, facts: RowFacts) -> RowFacts:
        return facts  # the number of neighbouring rows decides how many an access has

    def misfit(self, facts: RowFacts) -> str | None:
        apart = contiguous_axis(facts) is None
        return "threads_across, for rows that are no neighbours; accepted: threads_per_row" if apart else None

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[AcrossKnobs]:
        split = AcrossSplit.of(facts)
        ranked = sorted(usual(split, self.legal(facts, device)), key=self.cost(split, device))
        evicted = eviction(facts)
        return [replace(k, eviction=evicted) for k in best_first(ranked, mode)]

    def notes(self, facts: RowFacts, knobs: AcrossKnobs) -> Iterator[str]:
        if AcrossSplit.of(facts).piece == 1 and facts.rows > 1:
            yield "rows are read one at a time: by alignment, strides or extents no two of them fit an access"
        yield from super().notes(facts, knobs)

    def constants(self, split: AcrossSplit, knobs: AcrossKnobs) -> Mapping[str, bool | int | Access]:
        return {
            "ACROSS": knobs.threads_across,
            "GROUPS": knobs.groups,
            "PLACES": knobs.places,
            "CTAS_PER_SM": knobs.ctas_per_sm,
            **EVICTIONS[knobs.eviction],
        }

    def launch(self, facts: RowFacts, knobs: AcrossKnobs) -> Launch:
        made = replace(super().launch(facts, knobs), waits=True)
        if AcrossSplit.of(facts).serves_fewer:
            return made
        passed = (Constant("int64", facts.rows) if isinstance(a, RowCount) else a for a in made.arguments)
        return replace(made, arguments=tuple(passed), by_rows=None)

    def problem(self, facts: RowFacts) -> ProblemClass:
        split = AcrossSplit.of(facts)
        return problem(split.facts, split.piece, across=True)
