"""The by-row schedule, with one CTA for some rows, or a cluster for one: support, proposals and launch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.contract.engine import Launch
from graphfuse.engines.rows.by_row.cost import cost, eviction, is_usual, pays_ahead
from graphfuse.engines.rows.by_row.knobs import EVICTIONS, ByRowKnobs
from graphfuse.engines.rows.by_row.legal import MOST_CHUNKS, legal, malformed, may_read_ahead, unfit
from graphfuse.engines.rows.by_row.split import ByRowSplit
from graphfuse.engines.rows.kernel import Access
from graphfuse.engines.rows.limits import MAX_THREADS, static_faults
from graphfuse.engines.rows.schedule import PROPOSED, Schedule
from graphfuse.engines.rows.support import pair_reasons, part_reasons, period_reasons, tensor_reasons
from graphfuse.patterns.rows import RowFacts


class ByRow(Schedule[ByRowKnobs]):
    """Schedule in which each CTA processes the rows of its number, or a part of one, and ends."""

    knobs: ClassVar[type] = ByRowKnobs
    qualifiers: ClassVar[str] = "GF_KERNEL(THREADS)"
    split = staticmethod(ByRowSplit.of)
    legal_knobs = staticmethod(legal)
    malformed = staticmethod(malformed)
    unfit = staticmethod(unfit)
    cost = staticmethod(cost)

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        if facts.program.sums:
            yield f"{facts.node}: sums over rows; accepted: reductions of rows alone"
        yield from tensor_reasons(facts)
        split = ByRowSplit.of(facts)
        yield from pair_reasons(facts, split.chunk)
        yield from part_reasons(facts, split.chunk, MOST_CHUNKS)
        yield from period_reasons(facts, split.chunk)
        if not any(map(is_usual, self.legal(facts, device))):
            longest = ByRowKnobs(MAX_THREADS, MAX_THREADS)  # knobs that are legal for rows of any length
            for shared in static_faults(split.static_bytes(longest)):
                yield f"{split.maxima} largest magnitudes of a row: {shared}"
            yield f"{facts.rows} rows take more CTAs than a grid can have"

    def misfit(self, facts: RowFacts) -> str | None:
        if not facts.program.sums:
            return None
        return "CTAs that end, for sums over rows; accepted: knobs of CTAs that stay (stages, ctas_per_sm, ctas, delay)"

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[ByRowKnobs]:
        split, every = ByRowSplit.of(facts), self.legal(facts, device)
        pays = pays_ahead(split, device)

        def read_ahead(knobs: ByRowKnobs) -> ByRowKnobs:
            """The knobs with `ahead`, if that is legal and estimated to be faster."""
            return replace(knobs, ahead=1) if pays(knobs) and may_read_ahead(split, knobs) else knobs

        ranked = sorted((read_ahead(k) for k in every if is_usual(k)), key=self.cost(split, device))
        found = ranked[:PROPOSED]
        if mode is heur_mode.B:
            others = (replace(k, ahead=1 - k.ahead) for k in found if k.ahead or may_read_ahead(split, k))
            found = list(dict.fromkeys([*ranked, *others, *every]))
        evicted = eviction(facts)
        return [replace(k, eviction=evicted) for k in found]

    def constants(self, split: ByRowSplit, knobs: ByRowKnobs) -> Mapping[str, bool | int | Access]:
        # The compiler can move reads of column vectors before the reduction only if they are read-only. The largest
        # CTAs do not have registers for that.
        ahead = knobs.threads <= 512 or split.steps(knobs) * split.piece(knobs) <= 16
        return {
            "AHEAD": knobs.ahead == 1,
            "OWN_PAIRS": split.plan(knobs).own_pairs,
            "THREADS_PER_ROW": knobs.threads_per_row,
            "COLUMN_READS": Access.READ_ONLY if ahead else Access.USUAL,
            **EVICTIONS[knobs.eviction],
        }

    def launch(self, facts: RowFacts, knobs: ByRowKnobs) -> Launch:
        # CTAs that share a row need a cluster only if it is reduced.
        cluster = knobs.cluster if facts.program.last else 1
        return replace(super().launch(facts, knobs), cluster=cluster, waits=True)
