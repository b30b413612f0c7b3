"""CTAs that take row after row: what is proposed, the source and what the launch passes."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.engine import Launch, ProblemClass
from graphfuse.engines.rows.kernel import cpp, prelude, problem
from graphfuse.engines.rows.persistent.cost import cost
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs, every_knob
from graphfuse.engines.rows.persistent.legal import faults, fits
from graphfuse.engines.rows.persistent.split import RowSplit
from graphfuse.engines.rows.persistent.support import reasons
from graphfuse.engines.rows.schedule import READ_AGAIN, Schedule
from graphfuse.enums import heur_mode
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.steps import Join

_PROPOSED = 3


class Persistent(Schedule[PersistentKnobs]):
    """As many CTAs as run at the same time stay for all rows, and for sums over them."""

    knobs: ClassVar[type] = PersistentKnobs

    def prefers(self, facts: RowFacts) -> bool:
        """Sums over rows are made nowhere else. Rows of several tensors are worth being copied ahead."""
        program = facts.program
        return bool(program.sums) or any(len(set(program.joined(k))) > 1 for k in program.reductions(Join.SUM))

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        return reasons(facts, device)

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[PersistentKnobs]:
        split = RowSplit.of(facts)
        every = _legal(replace(facts, row_extents=(1,) * len(facts.row_extents)), device)
        ranked = sorted(every, key=lambda knobs: cost(split, knobs, device))
        # The best for each number of threads first: they differ more than numbers of stages do.
        best: dict[tuple[int, int], PersistentKnobs] = {}
        for knobs in ranked:
            best.setdefault((knobs.threads_per_row, knobs.threads), knobs)
        few = list(best.values())[:_PROPOSED]
        return list(dict.fromkeys(few + ranked)) if mode is heur_mode.B else few

    def faults(self, facts: RowFacts, knobs: PersistentKnobs, device: Device) -> Iterator[str]:
        return faults(RowSplit.of(facts), knobs, device)

    def notes(self, facts: RowFacts, knobs: PersistentKnobs) -> Iterator[str]:
        if facts.program.sums:
            yield "sums over rows: float32, in an order that knobs and rows decide, the same bits in every run"
        if not RowSplit.of(facts).resident(knobs):
            yield READ_AGAIN.format(columns=facts.columns)

    def source(self, facts: RowFacts, knobs: PersistentKnobs) -> str:
        name = "persistent.cu"
        return render(template(__package__, name), _prelude(facts, knobs), name)

    def launch(self, facts: RowFacts, knobs: PersistentKnobs) -> Launch:
        split = RowSplit.of(facts)
        by_rows = split.by_rows(knobs)
        return Launch(
            grid=by_rows.grid(facts.rows),
            block=knobs.threads,
            arguments=arguments(split.plan(knobs)),
            cluster=knobs.cluster,
            shared_bytes=split.dynamic_bytes(knobs),
            scratch_bytes=split.partial_bytes(knobs),
            cooperative=bool(facts.program.sums),
            cleared=tuple(store.view.tensor for store in facts.program.stores if store.amax),
            by_rows=by_rows,
        )

    def problem(self, facts: RowFacts) -> ProblemClass:
        # CTAs that stay take more or fewer rounds of the same.
        return problem(facts, RowSplit.of(facts).piece, within=4.0)


@functools.lru_cache(maxsize=256)
def _legal(facts: RowFacts, device: Device) -> tuple[PersistentKnobs, ...]:
    """All legal knobs, for any number of rows: of a network with rows of many numbers they are worked out once."""
    split = RowSplit.of(facts)
    return tuple(knobs for knobs in every_knob(split.pieces, device) if fits(split, knobs, device))


def _prelude(facts: RowFacts, knobs: PersistentKnobs) -> str:
    split = RowSplit.of(facts)
    constants = {
        "gf::i64 COLUMNS": facts.columns,
        "int CHUNK": split.chunk,
        "int PIECE": split.piece,
        "int STEPS": split.steps(knobs),
        "int PASSES": split.passes(knobs),
        "int THREADS_PER_ROW": knobs.threads_per_row,
        "int THREADS": knobs.threads,
        "int CTAS_PER_SM": knobs.ctas_per_sm,
        "bool DELAYED": cpp(bool(knobs.delay)),
        "int PARTIAL_WIDTH": 4 * split.partial_vector,
        "int PARTIALS": knobs.ctas // knobs.cluster,
        "int SLAB": split.slab(knobs),
        "gf::Access COLUMN_READS": "gf::Access::READ_ONLY",
        "gf::Access ROW_READS": "gf::Access::USUAL",
        "gf::Access ROW_WRITES": "gf::Access::USUAL",
    }
    return prelude(split.plan(knobs), constants, "GF_RESIDENT_KERNEL(THREADS, CTAS_PER_SM)")
