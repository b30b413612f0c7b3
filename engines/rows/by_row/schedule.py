"""A CTA for some rows, or several for one: what is proposed, the source and what the launch passes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.engine import ByRows, Launch, ProblemClass
from graphfuse.engines.rows.by_row.cost import cost, eviction, is_usual, read_ahead
from graphfuse.engines.rows.by_row.knobs import EVICTIONS, ByRowKnobs, every_knob
from graphfuse.engines.rows.by_row.legal import faults
from graphfuse.engines.rows.by_row.split import RowSplit, plan_of
from graphfuse.engines.rows.by_row.support import reasons
from graphfuse.engines.rows.kernel import cpp, prelude, problem
from graphfuse.engines.rows.schedule import READ_AGAIN, Schedule
from graphfuse.enums import heur_mode
from graphfuse.patterns.rows import RowFacts

_PROPOSED = 3


class ByRow(Schedule[ByRowKnobs]):
    """Each CTA takes the rows that its number says, or a part of one, and ends."""

    knobs: ClassVar[type] = ByRowKnobs

    def prefers(self, facts: RowFacts) -> bool:
        return False

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        return reasons(facts, device)

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[ByRowKnobs]:
        split = RowSplit.of(facts)
        every = [k for k in every_knob(eviction(facts)) if next(faults(facts, split, k, device), None) is None]
        usual = [read_ahead(facts, split, k, device) for k in every if is_usual(k)]
        ranked = sorted(usual, key=lambda knobs: cost(facts, split, knobs, device))
        if mode is not heur_mode.B:
            return ranked[:_PROPOSED]
        others = [replace(k, ahead=1 - k.ahead) for k in ranked[:_PROPOSED]]
        others = [k for k in others if next(faults(facts, split, k, device), None) is None]
        return list(dict.fromkeys(ranked + others + every))

    def faults(self, facts: RowFacts, knobs: ByRowKnobs, device: Device) -> Iterator[str]:
        return faults(facts, RowSplit.of(facts), knobs, device)

    def notes(self, facts: RowFacts, knobs: ByRowKnobs) -> Iterator[str]:
        if not RowSplit.of(facts).resident(knobs):
            yield READ_AGAIN.format(columns=facts.columns)

    def source(self, facts: RowFacts, knobs: ByRowKnobs) -> str:
        return render(template(__package__, "by_row.cu"), _prelude(facts, knobs), "by_row.cu")

    def launch(self, facts: RowFacts, knobs: ByRowKnobs) -> Launch:
        by_rows = ByRows(facts.rows, max(1, knobs.threads // knobs.threads_per_row), knobs.cluster)
        return Launch(
            grid=by_rows.grid(facts.rows),
            block=knobs.threads,
            arguments=arguments(plan_of(facts, knobs)),
            # CTAs that share a row meet where it is reduced, and nowhere else.
            cluster=knobs.cluster if facts.program.last else 1,
            cleared=tuple(store.view.tensor for store in facts.program.stores if store.amax),
            waits=True,
            by_rows=by_rows,
        )

    def problem(self, facts: RowFacts) -> ProblemClass:
        return problem(facts, RowSplit.of(facts).chunk)


def _prelude(facts: RowFacts, knobs: ByRowKnobs) -> str:
    split = RowSplit.of(facts)
    piece, steps = split.piece(knobs), split.steps(knobs)
    ahead = knobs.threads <= 512 or steps * piece <= 16
    constants = {
        "gf::i64 COLUMNS": facts.columns,
        "int CHUNK": split.chunk,
        "int PIECE": piece,
        "int STEPS": steps,
        "int PASSES": split.passes(knobs),
        "bool AHEAD": cpp(knobs.ahead == 1),
        "int THREADS_PER_ROW": knobs.threads_per_row,
        "int THREADS": knobs.threads,
        # Only of what nothing writes meanwhile, as no row is, can reads move ahead of the sum, for which the
        # largest CTAs have no registers left.
        "gf::Access COLUMN_READS": "gf::Access::READ_ONLY" if ahead else "gf::Access::USUAL",
        "gf::Access ROW_READS": EVICTIONS[knobs.eviction].reads,
        "gf::Access ROW_WRITES": EVICTIONS[knobs.eviction].writes,
    }
    return prelude(plan_of(facts, knobs), constants)
