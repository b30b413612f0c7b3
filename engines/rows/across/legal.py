"""Which knobs are legal for a problem on a device."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.rows.across.knobs import MOST_GROUPS, AcrossKnobs
from graphfuse.engines.rows.across.split import RowSplit, available
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.limits import (
    MAX_CTAS,
    WARP,
    power_faults,
    range_faults,
    resident_faults,
    static_faults,
    thread_faults,
)


def faults(split: RowSplit, knobs: AcrossKnobs, device: Device) -> Iterator[str]:
    yield from power_faults(knobs, ("threads_across",))
    groups = knobs.groups
    dealt = type(groups) is int and (groups == split.chunks or 0 < groups < split.chunks and not groups & (groups - 1))
    if not dealt or groups > MOST_GROUPS:
        yield (
            f"groups is {groups!r}; accepted: a power of two below the {split.chunks} chunks of a row, or as many as "
            f"these, up to {MOST_GROUPS}"
        )
    if knobs.threads % WARP:
        yield f"threads_across {knobs.threads_across}, groups {groups}; accepted: a CTA of whole warps"
    yield from range_faults(knobs, {"eviction": (0, len(EVICTIONS) - 1)})
    yield from thread_faults(knobs.threads)
    yield from range_faults(knobs, {"ctas_per_sm": (1, device.threads_per_sm // knobs.threads)})
    if split.facts.rows > MAX_CTAS * knobs.threads_across * split.piece:
        yield f"{split.facts.rows} rows take more CTAs than a grid can have"
    needed, there = split.registers(split.steps(knobs), split.passes(knobs)), available(knobs)
    if needed > there:
        yield (
            f"threads_across {knobs.threads_across}, groups {groups}, ctas_per_sm {knobs.ctas_per_sm}: {needed} "
            f"registers a thread for {split.chunk} columns at a time; accepted: {there}"
        )
    shared = split.static_bytes(knobs)
    yield from static_faults(shared)
    yield from resident_faults(knobs.ctas_per_sm, shared, device)
