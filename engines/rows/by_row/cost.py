"""Cost model: which knobs may pay, and the estimated time of a launch, to rank knobs that were not measured."""

import math

from graphfuse.device import Device
from graphfuse.engines.rows.by_row.knobs import ALL_FIRST, AS_USUAL, READS_LAST, ByRowKnobs
from graphfuse.engines.rows.by_row.split import RowSplit
from graphfuse.engines.rows.limits import MAX_THREADS, WARP
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.views import View

READ_AHEAD = range(9, 41)  # elements per thread for which reading ahead may pay; any kernel reads fewer ahead
_SECTOR = 32  # smallest memory transaction in bytes
# Instruction cost by output bits: (per thread, per element). Unit: the time to move 4 bytes.
_INSTRUCTIONS = {4: (2.4, 1.06), 8: (4.8, 0.565), 32: (3.5, 0.7)}
# Limits in bytes moved. Up to _CACHED, rows are often in the L2 before and after a kernel: the default eviction. Up to
# _SMALL, the L2 evicts all rows first. Beyond, it evicts input rows last.
_CACHED, _SMALL = 1 << 20, 6 << 20


def eviction(facts: RowFacts) -> int:
    """What the L2 evicts first, by the bytes moved. Tuning does not choose it. Rows that are evicted first leave a part
    of an earlier replay's rows in the L2, so timing by replay overrates it for memory much larger than the L2."""
    whole = (*facts.program.read_whole, *facts.program.written_whole)
    moved = sum(view.dtype.nbytes(facts.columns) * _rows(facts, view) for view in whole)
    if moved <= _CACHED:
        return AS_USUAL
    return ALL_FIRST if moved <= _SMALL else READS_LAST


def _rows(facts: RowFacts, view: View) -> int:
    """Rows that a tensor really has. Axes of stride 0, as of a weight for each head, do not count."""
    return math.prod(e for e, stride in zip(facts.row_extents, view.row_strides, strict=True) if stride)


def is_usual(knobs: ByRowKnobs) -> bool:
    """Whether CTAs have a size that may pay. Small CTAs wait less at barriers, but each takes time to start. Long rows
    may also pay in the largest CTAs."""
    if knobs.cluster > 1:
        return knobs.threads >= 64
    whole = knobs.threads == MAX_THREADS and knobs.threads_per_row >= 256
    return whole or knobs.threads == max(knobs.threads_per_row, 128)


def cost(split: RowSplit, knobs: ByRowKnobs, device: Device) -> float:
    """Time of a launch, in a unit of this model. Only comparisons of it mean anything.

    It is a sum of two parts. The throughput part is the longest of memory, instructions and CTA starts, and the
    exchange within clusters. The latency part is a launch on an idle device: a thread's elements, and the reduction.
    The constants are fitted to exhaustive searches on an H200, over random sizes and over rows with a residual or many
    columns (docs/tuning.md).
    """
    facts, program = split.facts, split.facts.program
    threads, piece = knobs.threads_per_row, split.piece(knobs)
    elements = split.steps(knobs) * piece  # per thread, including those past the row's end
    if not split.resident(knobs):
        elements = facts.columns / threads * (program.last + 1)
    written = [view.dtype.bits for view in program.written_whole]
    read = [view.dtype.bits for view in program.read_whole]
    more = max(0, len(read) - 1)  # inputs beyond the first
    bits = min(written, default=32)
    start, each = next(figures for most, figures in _INSTRUCTIONS.items() if bits <= most)
    start += 6 * (len(facts.row_extents) - 1)  # to find the row along its axes
    start += 3 * sum(bool(view.place.kind) for view in program.all_views)
    instructions = each * threads * (start + elements) * (1 + 0.1 * max(0.0, math.log2(threads / WARP)))
    instructions *= 1 + 0.25 * more
    if piece < max((s.block_size for s in program.stores), default=0):  # lanes that share a block compute its scale
        instructions *= 1.1
    moved = facts.columns * (sum(read) * (1 if split.resident(knobs) else program.last + 1) + sum(written)) / 32
    least = min((view.dtype.nbytes(piece) for view in program.read_whole), default=_SECTOR)
    sectors = max(1.0, _SECTOR / (threads * least))  # read per sector used
    busy = max(moved * sectors, instructions, 640 * threads / knobs.threads) + 17.6 * threads / knobs.threads
    warps = max(1.0, min(threads, knobs.threads) / WARP)  # that share a row
    awaited = 0.78 if knobs.ahead else 1
    alone = 10 + elements * awaited * (1 + 0.45 * more) + 2.4 * math.log2(threads) + 0.06 * warps
    alone += 0.8 * knobs.threads / WARP
    if knobs.cluster > 1:
        reductions = split.sums + split.maxima
        busy += reductions * threads * (knobs.cluster - 1)  # messages to the other CTAs
        alone += reductions * (9 + math.log2(knobs.cluster))
    return facts.rows / device.sm_count * busy + 1130 * alone
