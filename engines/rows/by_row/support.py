"""Which problems the engine takes."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.rows.by_row.cost import is_usual
from graphfuse.engines.rows.by_row.knobs import ByRowKnobs, every_knob
from graphfuse.engines.rows.by_row.legal import faults
from graphfuse.engines.rows.by_row.split import RowSplit
from graphfuse.engines.rows.limits import MAX_THREADS, static_faults
from graphfuse.engines.rows.support import program_reasons, tensor_reasons
from graphfuse.patterns.rows import RowFacts


def reasons(facts: RowFacts, device: Device) -> Iterator[str]:
    yield from program_reasons(facts, device)
    if facts.program.sums:
        yield f"{facts.node}: sums over rows; accepted: reductions of rows alone"
    yield from tensor_reasons(facts)
    split = RowSplit.of(facts)
    if not any(next(faults(facts, split, knobs, device), None) is None for knobs in filter(is_usual, every_knob())):
        longest = ByRowKnobs(MAX_THREADS, MAX_THREADS)  # what rows of any length take
        shared = next(static_faults(split.static_bytes(longest)), None)
        yield (
            f"{split.maxima} largest magnitudes of a row: {shared}"
            if shared
            else f"{facts.rows} rows take more CTAs than a grid can have"
        )
