"""The engine: what it proposes, the source it makes and what the launch passes."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.engine import KernelEngine, Launch, No, ProblemClass
from graphfuse.engines.rows.kernel import cpp, in_place, prelude, problem
from graphfuse.engines.rows.persistent.cost import cost
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs, every_knob
from graphfuse.engines.rows.persistent.legal import faults, fits
from graphfuse.engines.rows.persistent.split import RowSplit, resident_plan
from graphfuse.engines.rows.persistent.support import reasons
from graphfuse.engines.rows.support import op_notes, rounding_notes
from graphfuse.enums import heur_mode
from graphfuse.ir import TensorId
from graphfuse.patterns.rows import RowFacts

_PROPOSED = 3


class RmsNormBackwardEngine(KernelEngine[RowFacts, PersistentKnobs]):
    """One generated CUDA kernel; rows never enter its source.

    Numerics: float32 throughout, unless the graph declares roundings. The mean over a row is a fixed binary tree over
    chunks of 8 elements, the halves of each summed in order; of 4 where all that is read whole has 4 bytes an element.
    It has the same bits for every row count, knob and run, and whatever is written.
    Sums over rows are added up in an order that knobs and the number of rows decide: the same bits in every run.
    """

    name: ClassVar[str] = "rmsnorm_backward"
    facts: ClassVar[type] = RowFacts
    knobs: ClassVar[type] = PersistentKnobs
    modes: ClassVar[frozenset[heur_mode]] = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    entry: ClassVar[str] = "rmsnorm_backward"
    # CTAs that stay take more or fewer rounds of the same; the table has rows a factor of 8 apart.
    tuned_within: ClassVar[float] = 4.0

    def why_not(self, facts: RowFacts, device: Device) -> No | None:
        reason = next(reasons(facts, device), None)
        return None if reason is None else No(reason)

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

    def illegal(self, facts: RowFacts, knobs: PersistentKnobs, device: Device) -> No | None:
        reason = next(faults(RowSplit.of(facts), knobs, device), None)
        return None if reason is None else No(reason)

    def notes(self, facts: RowFacts, knobs: PersistentKnobs, device: Device) -> tuple[str, ...]:
        return tuple(_notes(facts, knobs))

    def in_place(self, facts: RowFacts, knobs: PersistentKnobs) -> tuple[tuple[TensorId, TensorId], ...]:
        """As of any row program; rows that are copied ahead are not yet written."""
        return in_place(resident_plan(facts))

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
            by_rows=by_rows,
        )

    def problem(self, facts: RowFacts) -> ProblemClass:
        return problem(facts, RowSplit.of(facts).piece)


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
    return prelude(split.plan(knobs), constants)


def _notes(facts: RowFacts, knobs: PersistentKnobs) -> Iterator[str]:
    yield from rounding_notes(facts.program)
    yield "mean over a row: a fixed binary tree, the same bits for every row count, knob and run"
    yield from op_notes(facts.program)
    if facts.program.sums:
        yield "sums over rows: float32, in an order that knobs and rows decide, the same bits in every run"
    if not RowSplit.of(facts).resident(knobs):
        yield f"rows of {facts.columns} columns do not fit in registers: they are read again in each phase"
