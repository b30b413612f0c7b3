"""Which knobs may pay, and what a launch with them takes: how candidates are ranked before anything was measured."""

import math

from graphfuse.device import Device
from graphfuse.engines.rows.by_row.knobs import ALL_FIRST, AS_USUAL, READS_LAST, ByRowKnobs
from graphfuse.engines.rows.by_row.split import RowSplit
from graphfuse.engines.rows.limits import MAX_THREADS, WARP
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import View

READ_AHEAD = range(9, 41)  # elements of a thread; fewer are read ahead by any kernel
_SECTOR = 32  # bytes that memory moves at least
# Of a thread and of each of its elements, by the output's bits, in the time that four bytes take.
_INSTRUCTIONS = {4: (2.4, 1.06), 8: (4.8, 0.565), 32: (3.5, 0.7)}
# Bytes moved. Up to the first, rows are often in the L2 when a kernel starts and when the next one does; up to the
# second they are given up first; beyond it those read are given up last.
_CACHED, _SMALL = 1 << 20, 6 << 20


def eviction(facts: RowFacts) -> int:
    """By the bytes that are moved. Tuning does not choose it: rows that are given up first leave some of an earlier
    replay's in the L2, so that timing by replay finds it faster than it is on memory that is far larger."""
    whole = (*facts.program.read_whole, *facts.program.written_whole)
    moved = sum(view.dtype.nbytes(facts.columns) * _rows(facts, view) for view in whole)
    if moved <= _CACHED:
        return AS_USUAL
    return ALL_FIRST if moved <= _SMALL else READS_LAST


def _rows(facts: RowFacts, view: View) -> int:
    """Rows that a tensor has: one that has the same for all indices of an axis, as a weight for each head, few."""
    return math.prod(e for e, stride in zip(facts.row_extents, view.row_strides, strict=True) if stride)


def is_usual(knobs: ByRowKnobs) -> bool:
    """Whether CTAs are of a size that may pay. Of rows of their own as small as can be, for more threads wait for
    each other, but not too small, for each takes time to start; long rows may pay as neighbours."""
    if knobs.cluster > 1:
        return knobs.threads >= 64
    whole = knobs.threads == MAX_THREADS and knobs.threads_per_row >= 256
    return whole or knobs.threads == max(knobs.threads_per_row, 128)


def cost(split: RowSplit, knobs: ByRowKnobs, device: Device) -> float:
    """Time of a launch in a unit of the model's own, by which knobs are compared.

    What keeps the device busy - memory, instructions or that CTAs start, whichever takes longer, and what CTAs
    of a cluster exchange - plus what a launch takes on an idle device: the elements that a
    thread goes through and the reduction. The figures are fitted to exhaustive searches on an H200
    over random sizes and over rows with a residual or many columns (docs/tuning.md).
    """
    facts, program = split.facts, split.facts.program
    threads, piece = knobs.threads_per_row, split.piece(knobs)
    elements = split.steps(knobs) * piece  # of a thread, those past the row's end among them
    if not split.resident(knobs):
        elements = facts.columns / threads * (program.last + 1)
    written = [view.dtype.bits for view in program.written_whole]
    read = [view.dtype.bits for view in program.read_whole]
    more = max(0, len(read) - 1)  # inputs than one
    bits = min(written, default=32)
    start, each = next(figures for most, figures in _INSTRUCTIONS.items() if bits <= most)
    start += 6 * (len(facts.row_extents) - 1)  # to find the row along its axes
    start += 3 * sum(view.indexed is not None or view.within is not None for view in program.all_views)
    instructions = each * threads * (start + elements) * (1 + 0.1 * max(0.0, math.log2(threads / WARP)))
    instructions *= 1 + 0.25 * more
    if piece < max((s.block_size for s in program.stores), default=0):  # lanes that share a block work on its scale
        instructions *= 1.1
    moved = facts.columns * (sum(read) * (1 if split.resident(knobs) else program.last + 1) + sum(written)) / 32
    least = min((view.dtype.nbytes(piece) for view in program.read_whole), default=_SECTOR)
    sectors = max(1.0, _SECTOR / (threads * least))  # read for each that is used
    busy = max(moved * sectors, instructions, 640 * threads / knobs.threads) + 17.6 * threads / knobs.threads
    warps = max(1.0, min(threads, knobs.threads) / WARP)  # that meet for a row
    awaited = 0.78 if knobs.ahead else 1
    alone = 10 + elements * awaited * (1 + 0.45 * more) + 2.4 * math.log2(threads) + 0.06 * warps
    alone += 0.8 * knobs.threads / WARP
    if knobs.cluster > 1:
        reductions = split.sums + split.maxima
        busy += reductions * threads * (knobs.cluster - 1)  # what each thread sends the other CTAs
        alone += reductions * (9 + math.log2(knobs.cluster))
    return facts.rows / device.sm_count * busy + 1130 * alone
