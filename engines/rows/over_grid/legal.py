"""The over-grid schedule's legal knobs, and the faults of others."""

from collections.abc import Iterator

from graphfuse.base.device import Device
from graphfuse.engines.rows.limits import (
    MAX_THREADS,
    block_faults,
    power_faults,
    range_faults,
    resident_faults,
    static_faults,
    thread_faults,
)
from graphfuse.engines.rows.over_grid.knobs import OverGridKnobs
from graphfuse.engines.rows.over_grid.split import OverGridSplit


def legal(split: OverGridSplit, device: Device) -> Iterator[OverGridKnobs]:
    """Legal knobs to choose from, with enough threads on an SM to hold much of a row, and with at least two CTAs per
    row."""
    for threads, ctas_per_sm in ((256, 2), (256, 4), (512, 1), (512, 2), (1024, 1)):
        for doubled in range(1, _most(split, ctas_per_sm, device).bit_length()):
            knobs = OverGridKnobs(1 << doubled, threads, ctas_per_sm)
            if next(unfit(split, knobs, device), None) is None:
                yield knobs


def malformed(split: OverGridSplit, knobs: OverGridKnobs, device: Device) -> Iterator[str]:
    yield from power_faults(knobs, ("ctas_per_row", "threads"))
    yield from thread_faults(knobs.threads)
    yield from range_faults(knobs, {"ctas_per_sm": (1, MAX_THREADS // knobs.threads)})


def unfit(split: OverGridSplit, knobs: OverGridKnobs, device: Device) -> Iterator[str]:
    most = _most(split, knobs.ctas_per_sm, device)
    if knobs.ctas_per_row > most:
        yield (
            f"ctas_per_row is {knobs.ctas_per_row}, ctas_per_sm {knobs.ctas_per_sm}; accepted for {split.facts.rows} "
            f"rows: up to {most}, as all CTAs run at the same time"
        )
    yield from block_faults(split.facts.program.block_sizes, split.piece, knobs.threads_per_row)
    shared = split.static_bytes(knobs)
    yield from static_faults(shared)
    yield from resident_faults(knobs.ctas_per_sm, shared, device)


def _most(split: OverGridSplit, ctas_per_sm: int, device: Device) -> int:
    """Maximum number of CTAs of a row."""
    return device.sm_count * ctas_per_sm // max(split.facts.rows, 1)
