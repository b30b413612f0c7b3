"""The schedule of one CTA for some rows, or several CTAs for one: support, proposals and launch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.device import Device
from graphfuse.engine import Launch, ProblemClass
from graphfuse.engines.rows.by_row.cost import READ_AHEAD, cost, eviction, is_usual
from graphfuse.engines.rows.by_row.knobs import EVICTIONS, ByRowKnobs, every_knob
from graphfuse.engines.rows.by_row.legal import faults
from graphfuse.engines.rows.by_row.split import RowSplit
from graphfuse.engines.rows.kernel import cpp, problem
from graphfuse.engines.rows.limits import MAX_THREADS, static_faults
from graphfuse.engines.rows.schedule import PROPOSED, Schedule
from graphfuse.engines.rows.support import pair_reasons, tensor_reasons
from graphfuse.enums import heur_mode
from graphfuse.patterns.rows import RowFacts


class ByRow(Schedule[ByRowKnobs]):
    """Each CTA takes the rows that its number says, or a part of one, and ends."""

    knobs: ClassVar[type] = ByRowKnobs
    kernel: ClassVar[str] = "by_row.cu"
    qualifiers: ClassVar[str] = "GF_KERNEL(THREADS)"
    split = staticmethod(RowSplit.of)
    faults = staticmethod(faults)

    def prefers(self, facts: RowFacts) -> bool:
        return False

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        if facts.program.sums:
            yield f"{facts.node}: sums over rows; accepted: reductions of rows alone"
        yield from tensor_reasons(facts)
        split = RowSplit.of(facts)
        yield from pair_reasons(facts, split.chunk)
        if not any(self.fits(split, knobs, device) for knobs in every_knob() if is_usual(knobs)):
            longest = ByRowKnobs(MAX_THREADS, MAX_THREADS)  # what rows of any length take
            for shared in static_faults(split.static_bytes(longest)):
                yield f"{split.maxima} largest magnitudes of a row: {shared}"
            yield f"{facts.rows} rows take more CTAs than a grid can have"

    def misfit(self, facts: RowFacts) -> str | None:
        if not facts.program.sums:
            return None
        return "CTAs that end, for sums over rows; accepted: knobs of CTAs that stay (stages, ctas_per_sm, ctas, delay)"

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[ByRowKnobs]:
        split = RowSplit.of(facts)
        every = [k for k in every_knob(eviction(facts)) if self.fits(split, k, device)]
        usual = [self._read_ahead(split, k, device) for k in every if is_usual(k)]
        ranked = sorted(usual, key=lambda knobs: cost(split, knobs, device))
        if mode is not heur_mode.B:
            return ranked[:PROPOSED]
        others = [replace(k, ahead=1 - k.ahead) for k in ranked[:PROPOSED]]
        return list(dict.fromkeys([*ranked, *(k for k in others if self.fits(split, k, device)), *every]))

    def _read_ahead(self, split: RowSplit, knobs: ByRowKnobs, device: Device) -> ByRowKnobs:
        """The knobs with all read before the sum, unless that takes so many registers that fewer CTAs are resident."""
        ahead = replace(knobs, ahead=1)
        indexed = any(view.place.numbers for view in split.facts.program.inputs)  # reads wait for a read
        pays = indexed or split.steps(knobs) * split.piece(knobs) in READ_AHEAD
        return ahead if pays and self.fits(split, ahead, device) else knobs

    def constants(self, split: RowSplit, knobs: ByRowKnobs) -> Mapping[str, object]:
        # Only of what nothing writes meanwhile, as no row is, can reads move ahead of the sum, for which the
        # largest CTAs have no registers left.
        ahead = knobs.threads <= 512 or split.steps(knobs) * split.piece(knobs) <= 16
        return {
            "bool AHEAD": cpp(knobs.ahead == 1),
            "bool OWN_PAIRS": cpp(split.has_own_pairs(knobs)),
            "int THREADS_PER_ROW": knobs.threads_per_row,
            "gf::Access COLUMN_READS": "gf::Access::READ_ONLY" if ahead else "gf::Access::USUAL",
            **EVICTIONS[knobs.eviction],
        }

    def launch(self, facts: RowFacts, knobs: ByRowKnobs) -> Launch:
        # CTAs that share a row meet where it is reduced, and nowhere else.
        cluster = knobs.cluster if facts.program.last else 1
        return replace(super().launch(facts, knobs), cluster=cluster, waits=True)

    def problem(self, facts: RowFacts) -> ProblemClass:
        return problem(facts, RowSplit.of(facts).chunk)
