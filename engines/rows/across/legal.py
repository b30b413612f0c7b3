"""Which knobs can be used for a problem on a device."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.rows.across.knobs import MOST_GROUPS, AcrossKnobs
from graphfuse.engines.rows.across.split import RowSplit, available
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.limits import MAX_CTAS, WARP, power_faults, static_faults, thread_faults


def faults(split: RowSplit, knobs: AcrossKnobs, device: Device) -> Iterator[str]:
    powers = next(power_faults(knobs, ("threads_across",)), None)
    if powers is not None:
        yield powers
        return
    groups = knobs.groups
    dealt = type(groups) is int and (groups == split.chunks or 0 < groups < split.chunks and not groups & (groups - 1))
    if not dealt or groups > MOST_GROUPS:
        yield (
            f"groups is {groups!r}; accepted: a power of two below the {split.chunks} chunks of a row, or as many as "
            f"these, up to {MOST_GROUPS}"
        )
        return
    if knobs.threads % WARP:
        yield f"threads_across {knobs.threads_across}, groups {groups}; accepted: a CTA of whole warps"
        return
    if type(knobs.eviction) is not int or knobs.eviction not in range(len(EVICTIONS)):
        yield f"eviction is {knobs.eviction!r}; accepted: 0 to {len(EVICTIONS) - 1}"
    too_many = next(thread_faults(knobs.threads), None)
    if too_many is not None:
        yield too_many
        return
    most = device.threads_per_sm // knobs.threads
    if type(knobs.ctas_per_sm) is not int or not 1 <= knobs.ctas_per_sm <= most:
        yield f"ctas_per_sm is {knobs.ctas_per_sm!r}; accepted: 1 to {most} on this device"
        return
    if split.facts.rows > MAX_CTAS * knobs.threads_across * split.piece:
        yield f"{split.facts.rows} rows take more CTAs than a grid can have"
    needed, there = split.registers(split.steps(knobs), split.passes(knobs)), available(knobs)
    if needed > there:
        yield (
            f"threads_across {knobs.threads_across}, groups {groups}, ctas_per_sm {knobs.ctas_per_sm}: {needed} "
            f"registers a thread for {split.chunk} columns at a time; accepted: {there}"
        )
    yield from static_faults(split.static_bytes(knobs))
    shared = knobs.ctas_per_sm * (split.static_bytes(knobs) + (1 << 10))
    most = device.shared_memory_per_sm
    if shared > most:
        yield f"{knobs.ctas_per_sm} CTAs an SM, {shared} bytes of shared memory; {device} has {most}"


def fits(split: RowSplit, knobs: AcrossKnobs, device: Device) -> bool:
    return next(faults(split, knobs, device), None) is None
