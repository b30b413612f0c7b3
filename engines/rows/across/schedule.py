"""A CTA for neighbouring rows: what is proposed, the source and what the launch passes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.engine import Constant, Launch, ProblemClass, RowCount
from graphfuse.engines.rows.across.axes import side_by_side
from graphfuse.engines.rows.across.cost import PROPOSED, cost, usual
from graphfuse.engines.rows.across.knobs import AcrossKnobs, every_knob
from graphfuse.engines.rows.across.legal import faults, fits
from graphfuse.engines.rows.across.split import RowSplit
from graphfuse.engines.rows.across.support import reasons
from graphfuse.engines.rows.by_row.cost import eviction
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.kernel import prelude, problem
from graphfuse.engines.rows.schedule import READ_AGAIN, Schedule
from graphfuse.enums import heur_mode
from graphfuse.patterns.rows import RowFacts


class Across(Schedule[AcrossKnobs]):
    """Threads take neighbouring rows of one column after another. A row has the bits that it has in other layouts."""

    knobs: ClassVar[type] = AcrossKnobs

    def prefers(self, facts: RowFacts) -> bool:
        return any(view.column_stride != 1 for view in facts.program.read_whole)

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        return reasons(facts, device)

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[AcrossKnobs]:
        split = RowSplit.of(facts)
        every = [k for k in every_knob(split.chunks, device, eviction(facts)) if fits(split, k, device)]
        ranked = sorted(usual(split, every), key=lambda knobs: cost(split, knobs, device))
        # The best for each way to spread rows first: they differ more than numbers of CTAs do.
        best: dict[tuple[int, int], AcrossKnobs] = {}
        for knobs in ranked:
            best.setdefault((knobs.threads_across, knobs.groups), knobs)
        few = list(best.values())[:PROPOSED]
        return list(dict.fromkeys(few + ranked)) if mode is heur_mode.B else few

    def faults(self, facts: RowFacts, knobs: AcrossKnobs, device: Device) -> Iterator[str]:
        if side_by_side(facts) is None:
            yield "threads_across, for rows that are no neighbours; accepted: threads_per_row"
            return
        yield from faults(RowSplit.of(facts), knobs, device)

    def notes(self, facts: RowFacts, knobs: AcrossKnobs) -> Iterator[str]:
        split = RowSplit.of(facts)
        if split.piece == 1 and facts.rows > 1:
            yield "rows are read one at a time: by alignment, strides or extents no two of them fit an access"
        if not split.resident(knobs):
            yield READ_AGAIN.format(columns=facts.columns)

    def source(self, facts: RowFacts, knobs: AcrossKnobs) -> str:
        return render(template(__package__, "across.cu"), _prelude(facts, knobs), "across.cu")

    def launch(self, facts: RowFacts, knobs: AcrossKnobs) -> Launch:
        split = RowSplit.of(facts)
        passed, by_rows = arguments(split.plan(knobs)), split.grid(knobs)
        if not split.serves_fewer:
            passed = tuple(Constant("int64", facts.rows) if isinstance(a, RowCount) else a for a in passed)
        return Launch(
            grid=by_rows.grid(facts.rows),
            block=knobs.threads,
            arguments=passed,
            cleared=tuple(store.view.tensor for store in facts.program.stores if store.amax),
            waits=True,
            by_rows=by_rows if split.serves_fewer else None,
        )

    def problem(self, facts: RowFacts) -> ProblemClass:
        split = RowSplit.of(facts)
        found = problem(split.facts, split.piece)
        return replace(found, key={**found.key, "across": split.piece})


def _prelude(facts: RowFacts, knobs: AcrossKnobs) -> str:
    split = RowSplit.of(facts)
    constants = {
        "gf::i64 COLUMNS": facts.columns,
        "int CHUNK": split.chunk,
        "int PIECE": split.piece,
        "int STEPS": split.steps(knobs),
        "int PASSES": split.passes(knobs),
        "int ACROSS": knobs.threads_across,
        "int GROUPS": knobs.groups,
        "int THREADS": knobs.threads,
        "int PLACES": knobs.places,
        "int CTAS_PER_SM": knobs.ctas_per_sm,
        "gf::Access COLUMN_READS": "gf::Access::READ_ONLY",
        "gf::Access ROW_READS": EVICTIONS[knobs.eviction].reads,
        "gf::Access ROW_WRITES": EVICTIONS[knobs.eviction].writes,
    }
    return prelude(split.plan(knobs), constants, "GF_RESIDENT_KERNEL(THREADS, CTAS_PER_SM)")
