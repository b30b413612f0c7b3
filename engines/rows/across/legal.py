"""The across schedule's legal knobs, and the faults of others."""

from collections.abc import Iterator

from graphfuse.base.device import Device
from graphfuse.engines.rows.across.knobs import MOST_GROUPS, AcrossKnobs
from graphfuse.engines.rows.across.split import AcrossSplit, available
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.limits import (
    WARP,
    power_faults,
    range_faults,
    resident_faults,
    static_faults,
    thread_faults,
)


def legal(split: AcrossSplit, device: Device) -> Iterator[AcrossKnobs]:
    """Legal knobs to choose from."""
    chunks = split.chunks
    groups = {1 << k for k in range(MOST_GROUPS.bit_length()) if 1 << k < chunks} | {chunks} & {*range(MOST_GROUPS + 1)}
    for threads_across in (4, 8, 16, 32, 64, 128, 256):
        for count in sorted(groups):
            for ctas in (1, 2, 3, 4, 5, 6, 8, 12, 16):
                knobs = AcrossKnobs(threads_across, count, ctas)
                if ctas * knobs.threads <= device.threads_per_sm and next(unfit(split, knobs, device), None) is None:
                    yield knobs


def malformed(split: AcrossSplit, knobs: AcrossKnobs, device: Device) -> Iterator[str]:
    yield from power_faults(knobs, ("threads_across",))
    groups = knobs.groups
    dealt = type(groups) is int and (groups == split.chunks or 0 < groups < split.chunks and not groups & (groups - 1))
    if not dealt or groups > MOST_GROUPS:
        yield (
            f"groups is {groups!r}; accepted: a power of two below the {split.chunks} chunks of a row, or as many as "
            f"these, up to {MOST_GROUPS}"
        )
    yield from range_faults(knobs, {"eviction": (0, len(EVICTIONS) - 1)})


def unfit(split: AcrossSplit, knobs: AcrossKnobs, device: Device) -> Iterator[str]:
    given = f"threads_across {knobs.threads_across}, groups {knobs.groups}"
    if knobs.threads % WARP:
        yield f"{given}; accepted: a CTA of whole warps"
    yield from thread_faults(knobs.threads)
    yield from range_faults(knobs, {"ctas_per_sm": (1, device.threads_per_sm // knobs.threads)})
    needed, there = split.registers(split.steps(knobs), split.passes(knobs)), available(knobs)
    if needed > there:
        yield (
            f"{given}, ctas_per_sm {knobs.ctas_per_sm}: {needed} registers a thread for {split.chunk} columns at a "
            f"time; accepted: {there}"
        )
    shared = split.static_bytes(knobs)
    yield from static_faults(shared)
    yield from resident_faults(knobs.ctas_per_sm, shared, device)
