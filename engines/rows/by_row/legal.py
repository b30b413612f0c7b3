"""The by-row schedule's legal knobs, and the faults of others."""

from collections.abc import Iterator

from graphfuse.base.device import Device
from graphfuse.engines.rows.by_row.knobs import EVICTIONS, ByRowKnobs
from graphfuse.engines.rows.by_row.split import ByRowSplit, held_registers
from graphfuse.engines.rows.limits import (
    MAX_THREADS,
    block_faults,
    cluster_faults,
    pair_faults,
    period_faults,
    power_faults,
    range_faults,
    static_faults,
    thread_faults,
)

MOST_CHUNKS = 4
_MOST_TOGETHER = 16  # elements that a thread of the largest CTAs can process at a time with its registers


def legal(split: ByRowSplit, device: Device) -> Iterator[ByRowKnobs]:
    """Legal knobs to choose from."""
    for chunks in (1, 2, MOST_CHUNKS):
        for threads_per_row in (1 << k for k in range(15)):
            for threads in (64, 128, 256, 512, 1024):
                knobs = ByRowKnobs(threads_per_row, threads, chunks)
                if next(unfit(split, knobs, device), None) is None:
                    yield knobs


def malformed(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> Iterator[str]:
    yield from power_faults(knobs, ("threads_per_row", "threads", "chunks"))
    yield from range_faults(knobs, {"eviction": (0, len(EVICTIONS) - 1), "ahead": (0, 1)})
    yield from thread_faults(knobs.threads)


def unfit(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> Iterator[str]:
    facts = split.facts
    if knobs.threads_per_row > knobs.threads:
        yield from cluster_faults(knobs.threads_per_row, knobs.threads, device)
    if split.chunks % knobs.chunks:
        yield f"chunks is {knobs.chunks}; accepted: a divisor of the {split.chunks} chunks of a row"
    piece = split.piece(knobs)
    pairs = facts.program.all_pairs
    if pairs:
        yield from pair_faults(pairs, piece, knobs.threads_per_row, split.per_thread(knobs), True)
    yield from period_faults(facts.program.periods, piece)
    yield from static_faults(split.static_bytes(knobs))
    if not split.resident(knobs):
        if (knobs.threads_per_row, knobs.chunks) != (MAX_THREADS, 1):
            yield (
                f"threads_per_row is {knobs.threads_per_row}, chunks {knobs.chunks}; rows of {facts.columns} columns "
                f"are read again in each phase, which takes {MAX_THREADS} and 1"
            )
        return
    held = needed_registers(split, knobs, knobs.ahead)
    if held > held_registers(knobs.threads):
        yield (
            f"threads_per_row {knobs.threads_per_row} needs {held} registers a thread to hold {facts.columns} "
            f"columns; at {knobs.threads} threads at most {held_registers(knobs.threads)} may"
        )
    if knobs.threads == MAX_THREADS and piece > _MOST_TOGETHER:
        yield (
            f"chunks is {knobs.chunks}: of {knobs.threads} threads each has registers for {_MOST_TOGETHER} elements "
            f"at a time, not for {piece}"
        )
    yield from block_faults(facts.program.block_sizes, piece, knobs.threads_per_row)


def may_read_ahead(split: ByRowSplit, knobs: ByRowKnobs) -> bool:
    """True if legal knobs are also legal with `ahead`, which needs more registers if rows are resident."""
    return not split.resident(knobs) or needed_registers(split, knobs, 1) <= held_registers(knobs.threads)


def needed_registers(split: ByRowSplit, knobs: ByRowKnobs, ahead: int) -> int:
    """Number of registers in which a thread holds its part of a row."""
    return split.held(split.steps(knobs), knobs, split.registers + (split.later if ahead else 0))
