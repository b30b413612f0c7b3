"""The engine: what it proposes, the source it makes and what the launch passes."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.engine import Constant, KernelEngine, Launch, No, ProblemClass, RowCount
from graphfuse.engines.rows.across.cost import PROPOSED, cost, usual
from graphfuse.engines.rows.across.knobs import AcrossKnobs, every_knob
from graphfuse.engines.rows.across.legal import faults, fits
from graphfuse.engines.rows.across.split import RowSplit, resident_plan
from graphfuse.engines.rows.across.support import reasons
from graphfuse.engines.rows.by_row.cost import eviction
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.kernel import in_place, prelude, problem
from graphfuse.engines.rows.support import FP8, op_notes, rounding_notes
from graphfuse.enums import heur_mode
from graphfuse.ir import TensorId
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.steps import Join

_FP8_INSTRUCTION = 89  # and newer


class AcrossEngine(KernelEngine[RowFacts, AcrossKnobs]):
    """One generated CUDA kernel; rows never enter its source, but for what they and the layout are multiples of.

    Numerics: float32 throughout, unless the graph declares roundings; a sum over a row is the same fixed binary tree
    over chunks of 8 elements, the halves of each summed in order, as of rows whose columns lie side by side.
    """

    name: ClassVar[str] = "rmsnorm_across"
    facts: ClassVar[type] = RowFacts
    knobs: ClassVar[type] = AcrossKnobs
    modes: ClassVar[frozenset[heur_mode]] = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    entry: ClassVar[str] = "rmsnorm_across"
    dependent_launch: ClassVar[bool] = True

    def why_not(self, facts: RowFacts, device: Device) -> No | None:
        reason = next(reasons(facts, device), None)
        return None if reason is None else No(reason)

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

    def illegal(self, facts: RowFacts, knobs: AcrossKnobs, device: Device) -> No | None:
        reason = next(faults(RowSplit.of(facts), knobs, device), None)
        return None if reason is None else No(reason)

    def notes(self, facts: RowFacts, knobs: AcrossKnobs, device: Device) -> tuple[str, ...]:
        return tuple(_notes(facts, knobs, device))

    def in_place(self, facts: RowFacts, knobs: AcrossKnobs) -> tuple[tuple[TensorId, TensorId], ...]:
        return in_place(resident_plan(RowSplit.of(facts)))

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
            by_rows=by_rows if split.serves_fewer else None,
        )

    def problem(self, facts: RowFacts) -> ProblemClass:
        split = RowSplit.of(facts)
        found = problem(split.facts, split.piece)
        return ProblemClass({**found.key, "across": split.piece}, found.rows)


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
        "int PLACES": knobs.places,
        "int CTAS_PER_SM": knobs.ctas_per_sm,
        "gf::Access COLUMN_READS": "gf::Access::READ_ONLY",
        "gf::Access ROW_READS": EVICTIONS[knobs.eviction].reads,
        "gf::Access ROW_WRITES": EVICTIONS[knobs.eviction].writes,
    }
    return prelude(split.plan(knobs), constants)


def _notes(facts: RowFacts, knobs: AcrossKnobs, device: Device) -> Iterator[str]:
    program, split = facts.program, RowSplit.of(facts)
    yield from rounding_notes(program)
    if program.reductions(Join.SUM):
        yield "sums over a row: a fixed binary tree, the same bits for every row count, knob and run"
    yield from op_notes(program)
    if split.piece == 1 and facts.rows > 1:
        yield "rows are read one at a time: by alignment, strides or extents no two of them fit an access"
    if not split.resident(knobs):
        yield f"rows of {facts.columns} columns do not fit in registers: they are read again in each phase"
    if any(store.view.dtype in FP8 for store in program.stores):
        hardware = device.kind == "cuda" and device.sm >= _FP8_INSTRUCTION
        yield f"FP8 conversion: {'instruction' if hardware else 'software, bit-identical to the instruction'}"
