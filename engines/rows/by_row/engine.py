"""The engine: what it proposes, the source it makes and what the launch passes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.engine import ByRows, KernelEngine, Launch, No, ProblemClass
from graphfuse.engines.rows.by_row.cost import cost, eviction, is_usual, read_ahead
from graphfuse.engines.rows.by_row.knobs import EVICTIONS, ByRowKnobs, every_knob
from graphfuse.engines.rows.by_row.legal import faults
from graphfuse.engines.rows.by_row.notes import notes
from graphfuse.engines.rows.by_row.split import RowSplit, plan_of, resident_plan
from graphfuse.engines.rows.by_row.support import reasons
from graphfuse.engines.rows.kernel import cpp, in_place, prelude, problem
from graphfuse.enums import heur_mode
from graphfuse.ir import TensorId
from graphfuse.patterns.rows import RowFacts

_PROPOSED = 3


class RmsNormEngine(KernelEngine[RowFacts, ByRowKnobs]):
    """One generated CUDA kernel; rows never enter its source.

    Numerics: float32 throughout, unless the graph declares roundings; a sum over a row is a fixed
    binary tree over chunks of 8 elements, the halves of each summed in order. FP4
    elements differ from the value before quantization by at most max(scale, amax - 6 * scale),
    scale and amax being those of the block: half the widest gap of E2M1 (4 to 6), or what
    saturation cuts off where rounding made the scale small. Rounding value * (1 / scale)
    may add 2e-6 of that.
    """

    name: ClassVar[str] = "rmsnorm"
    facts: ClassVar[type] = RowFacts
    knobs: ClassVar[type] = ByRowKnobs
    modes: ClassVar[frozenset[heur_mode]] = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    entry: ClassVar[str] = "rmsnorm"
    dependent_launch: ClassVar[bool] = True

    def why_not(self, facts: RowFacts, device: Device) -> No | None:
        reason = next(reasons(facts, device), None)
        return None if reason is None else No(reason)

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

    def illegal(self, facts: RowFacts, knobs: ByRowKnobs, device: Device) -> No | None:
        reason = next(faults(facts, RowSplit.of(facts), knobs, device), None)
        return None if reason is None else No(reason)

    def notes(self, facts: RowFacts, knobs: ByRowKnobs, device: Device) -> tuple[str, ...]:
        return tuple(notes(facts, knobs, device))

    def in_place(self, facts: RowFacts, knobs: ByRowKnobs) -> tuple[tuple[TensorId, TensorId], ...]:
        return in_place(resident_plan(facts))

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
