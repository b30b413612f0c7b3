"""The persistent schedule's legal knobs, and the faults of others."""

from collections.abc import Iterator
from dataclasses import replace

from graphfuse.base.device import Device
from graphfuse.engines.rows.limits import (
    MAX_CTAS,
    block_faults,
    cluster_faults,
    pair_faults,
    power_faults,
    range_faults,
    resident_faults,
    static_faults,
    thread_faults,
)
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs
from graphfuse.engines.rows.persistent.split import PersistentSplit

_MOST_STAGES = 8


def legal(split: PersistentSplit, device: Device) -> Iterator[PersistentKnobs]:
    """Legal knobs to choose from, with as many CTAs as run at the same time, and with no more threads for a row than it
    has pieces."""
    for threads in (128, 256, 512, 1024):
        for threads_per_row in (1 << k for k in range(min(15, 1 + (split.pieces - 1).bit_length()))):
            for ctas_per_sm in (1, 2, 3, 4):
                ctas = device.sm_count * ctas_per_sm
                ctas -= ctas % max(1, threads_per_row // threads)
                for stages in (1, 2, 3, 4, 5, 6, 8):
                    knobs = PersistentKnobs(threads_per_row, threads, stages, ctas_per_sm, ctas)
                    if next(unfit(split, knobs, device), None) is None:
                        yield knobs
                        if split.can_delay(knobs):
                            yield replace(knobs, delay=1)
                    elif stages > 1:
                        break  # more stages only need more shared memory


def malformed(split: PersistentSplit, knobs: PersistentKnobs, device: Device) -> Iterator[str]:
    yield from power_faults(knobs, ("threads_per_row", "threads"))
    per_sm = device.threads_per_sm // knobs.threads
    yield from range_faults(knobs, {"stages": (1, _MOST_STAGES), "ctas_per_sm": (1, per_sm), "ctas": (1, MAX_CTAS)})
    yield from range_faults(knobs, {"delay": (0, 1)})
    yield from thread_faults(knobs.threads)


def unfit(split: PersistentSplit, knobs: PersistentKnobs, device: Device) -> Iterator[str]:
    if knobs.threads_per_row > knobs.threads:
        yield from cluster_faults(knobs.threads_per_row, knobs.threads, device)
    if knobs.ctas % knobs.cluster:
        yield f"ctas is {knobs.ctas}; accepted: a multiple of the {knobs.cluster} CTAs of a cluster"
    if knobs.ctas > device.sm_count * knobs.ctas_per_sm:
        yield f"ctas is {knobs.ctas}; accepted: up to {device.sm_count * knobs.ctas_per_sm}, that run at the same time"
    if not split.resident(knobs) and not split.is_again(knobs):
        yield (
            f"threads_per_row {knobs.threads_per_row}, threads {knobs.threads}, ctas_per_sm {knobs.ctas_per_sm}: too "
            f"few registers for rows of {split.facts.columns} columns; rows that are read again in each phase take 512 "
            "threads and 1 stage"
        )
    yield from block_faults(split.facts.program.block_sizes, split.piece, knobs.threads_per_row)
    if knobs.stages > 1 and not split.stage_bytes(knobs):
        yield f"stages is {knobs.stages}; accepted: 1, as no input of the rows is aligned to 4 bytes"
    pairs = split.facts.program.all_pairs
    if pairs:
        yield from pair_faults(pairs, split.piece, knobs.threads_per_row, split.per_thread(knobs), exchanges_own=True)
    if knobs.delay and not split.can_delay(knobs):
        yield (
            "delay is 1; accepted: 0, but for 3 stages and more, rows of 2 to 16 warps, of which all that is read is "
            "copied and nothing kept, and no more than 32 elements a thread"
        )
    static = split.static_bytes(knobs)
    yield from static_faults(static)
    needed = split.dynamic_bytes(knobs) + static
    if needed > device.shared_memory_per_block:
        yield f"{needed} bytes of shared memory a CTA; {device} has {device.shared_memory_per_block}"
    yield from resident_faults(knobs.ctas_per_sm, needed, device)
