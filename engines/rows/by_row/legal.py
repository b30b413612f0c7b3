"""Which knobs are legal for a problem on a device."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.rows.by_row.knobs import EVICTIONS, ByRowKnobs
from graphfuse.engines.rows.by_row.split import RowSplit, held_registers
from graphfuse.engines.rows.limits import (
    MAX_CTAS,
    MAX_THREADS,
    block_faults,
    cluster_faults,
    pair_faults,
    power_faults,
    range_faults,
    static_faults,
    thread_faults,
)

_MOST_TOGETHER = 16  # elements that a thread of the largest CTAs has registers to work on at a time


def faults(split: RowSplit, knobs: ByRowKnobs, device: Device) -> Iterator[str]:
    facts = split.facts
    yield from power_faults(knobs, ("threads_per_row", "threads", "chunks"))
    yield from range_faults(knobs, {"eviction": (0, len(EVICTIONS) - 1), "ahead": (0, 1)})
    yield from thread_faults(knobs.threads)
    yield from cluster_faults(knobs.threads_per_row, knobs.threads, device)
    if facts.rows * knobs.threads_per_row > MAX_CTAS * knobs.threads:
        yield f"{facts.rows} rows, {knobs.threads_per_row} threads each, take more CTAs than a grid can have"
    if split.chunks % knobs.chunks:
        yield f"chunks is {knobs.chunks}; accepted: a divisor of the {split.chunks} chunks of a row"
    piece = split.piece(knobs)
    yield from pair_faults(facts.program.all_pairs, piece, knobs.threads_per_row, split.taken(knobs), True)
    yield from static_faults(split.static_bytes(knobs))
    if not split.resident(knobs):
        if (knobs.threads_per_row, knobs.chunks) != (MAX_THREADS, 1):
            yield (
                f"threads_per_row is {knobs.threads_per_row}, chunks {knobs.chunks}; rows of {facts.columns} columns "
                f"are read again in each phase, which takes {MAX_THREADS} and 1"
            )
        return
    held = split.held(split.steps(knobs), knobs, split.registers + (split.later if knobs.ahead else 0))
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
