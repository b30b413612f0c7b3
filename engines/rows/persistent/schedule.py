"""The persistent schedule: support, proposals and launch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from graphfuse.base.device import Device
from graphfuse.contract.engine import Launch, ProblemClass
from graphfuse.engines.rows.kernel import Access
from graphfuse.engines.rows.persistent.cost import cost
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs
from graphfuse.engines.rows.persistent.legal import legal, malformed, unfit
from graphfuse.engines.rows.persistent.split import PersistentSplit
from graphfuse.engines.rows.problem import problem
from graphfuse.engines.rows.schedule import Schedule
from graphfuse.engines.rows.support import pair_reasons, part_reasons, period_reasons, place_reasons, tensor_reasons
from graphfuse.patterns.rows import RowFacts


class Persistent(Schedule[PersistentKnobs]):
    """Schedule in which as many CTAs as run at the same time process all rows, and sums over rows."""

    knobs: ClassVar[type] = PersistentKnobs
    split = staticmethod(PersistentSplit.of)
    legal_knobs = staticmethod(legal)
    malformed = staticmethod(malformed)
    unfit = staticmethod(unfit)
    cost = staticmethod(cost)

    def prefers(self, facts: RowFacts) -> bool:
        """True if there are sums over rows, which only this schedule computes. Without them, `by_row` is faster."""
        return bool(facts.program.sums)

    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        yield from place_reasons(facts, rotates=True)
        yield from tensor_reasons(facts)
        piece = PersistentSplit.of(facts).piece
        yield from pair_reasons(facts, piece, most=piece)
        yield from part_reasons(facts, piece)
        yield from period_reasons(facts, piece)
        misfit = self.misfit(facts)
        if misfit:
            yield f"{facts.node}: {misfit}"
        if not self.legal(facts, device):
            yield f"{facts.node}: no way to spread rows of {facts.columns} columns over the threads of {device}"

    def misfit(self, facts: RowFacts) -> str | None:
        if facts.program.last or facts.program.sums:
            return None
        return "rows that are not reduced; accepted: rows that are reduced or summed, for which CTAs stay"

    def notes(self, facts: RowFacts, knobs: PersistentKnobs) -> Iterator[str]:
        if facts.program.sums:
            yield "sums over rows: float32, in an order that knobs and rows decide, the same bits in every run"
        yield from super().notes(facts, knobs)

    def constants(self, split: PersistentSplit, knobs: PersistentKnobs) -> Mapping[str, bool | int | Access]:
        return {
            "THREADS_PER_ROW": knobs.threads_per_row,
            "CTAS_PER_SM": knobs.ctas_per_sm,
            "DELAYED": bool(knobs.delay),
            "OWN_PAIRS": split.plan(knobs).own_pairs,
            "PARTIAL_WIDTH": 4 * split.partial_vector,
            "PARTIALS": knobs.ctas // knobs.cluster,
            "SLAB": split.slab(knobs),
        }

    def launch(self, facts: RowFacts, knobs: PersistentKnobs) -> Launch:
        split = PersistentSplit.of(facts)
        return replace(
            super().launch(facts, knobs),
            cluster=knobs.cluster,
            shared_bytes=split.dynamic_bytes(knobs),
            scratch_bytes=split.partial_bytes(knobs),
            cooperative=bool(facts.program.sums),
        )

    def problem(self, facts: RowFacts) -> ProblemClass:
        # More or fewer rows only change the number of rounds.
        return problem(facts, PersistentSplit.of(facts).piece, within=4.0)
