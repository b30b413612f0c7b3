"""Cost model: finds knobs that may be fast, and estimates the time of a launch to rank knobs that were not measured."""

import math
from collections.abc import Callable
from functools import cache

from graphfuse.base.device import Device
from graphfuse.engines.rows.by_row.knobs import ALL_FIRST, AS_USUAL, READS_LAST, ByRowKnobs
from graphfuse.engines.rows.by_row.split import ByRowSplit
from graphfuse.engines.rows.limits import MAX_THREADS, WARP
from graphfuse.ops import Cost
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import cost_of
from graphfuse.rows.steps import Chain
from graphfuse.rows.views import View

_READ_AHEAD = range(9, 41)  # elements per thread for which reading ahead may be faster; fewer are always read ahead
_COMPUTED = {Cost.COPY: 0, Cost.ARITHMETIC: 1, Cost.FUNCTION: 8}  # operations of an element; a rounding is one more
_CROWDED, _MANY_ROWS = 12, 64  # operations times column vectors, and rows per SM, above which reading ahead is slower
_SECTOR, _LINE, _ACCESS = 32, 128, 16  # smallest memory transaction, line of the L1, widest access, in bytes
# Limits of eviction in bytes moved. Up to _CACHED, rows are often in the L2 before and after a kernel, so eviction is
# the default. Up to _SMALL, all rows are evicted first. Above that, input rows are evicted last.
_CACHED, _SMALL = 1 << 20, 6 << 20

# Nanoseconds, fitted to exhaustive searches on an H200; docs/records/heuristics-nvidia-h200.json has searches of other
# sizes. Throughput of an SM:
_BYTES = 32.0  # bytes that memory moves for an SM in a nanosecond, to which all other times are relative
_CTA_AT_LEAST, _CTA = 80.0, 2.2  # to start a CTA: if nothing else takes as long, and in any case
_LONE = 0.6  # share of a row that an SM does alone, if there are fewer rows than SMs
_SERVED = 0.77  # for the L1 to serve a line to a warp: one kernel of qk-norm-nvidia-h200.json, 32768x32x8
_MESSAGE = 0.125  # of a thread to another CTA of its cluster, in each reduction
# Instructions, by the bits of the narrowest output: a thread's overhead as a number of elements; time of an element.
_INSTRUCTIONS = {4: (2.4, 0.1325), 8: (4.8, 0.070625), 32: (3.5, 0.0875)}
_AXIS, _CHOSEN = 6, 3  # time to find a row along another axis, and one at another place, as a number of elements
_BESIDE = 0.4  # share of the instructions that memory's time does not hide
_DOUBLED = 0.1  # share of the instructions that each doubling of a row's warps adds
_MORE_READ = 0.25  # share of the instructions that each input beyond the first adds
_SHARED_BLOCK = 1.1  # factor where lanes that share a block compute its scale
_WIDE = 0.08  # share of the instructions that each doubling of a thread's neighbouring chunks adds
# Time to reduce a part of the row among lanes for a piece, as a number of elements; factor if threads have more than
# the third number of elements each, so that there are too few threads to hide it.
_PART, _PART_OF_MANY, _MANY_ELEMENTS = 2.0, 1.2, 64
# Times of a launch on an idle device, as numbers of elements of a thread:
_ELEMENT = 141.25  # of one
_LAUNCH = 10  # to begin and to end
_AHEAD, _MORE_AWAITED = 0.78, 0.45  # factor if all is read ahead; share that each input beyond the first adds
_ROUND, _ROW_WARP = 2.4, 0.06  # for each doubling of the threads that reduce a row, and for each warp of a CTA's part
_CTA_WARP = 0.5  # to start each warp of a CTA
_MEETING = 6  # for each doubling of a row's threads, if CTAs wait for those of other ranks (measured on two H100s)
_CLUSTER, _CLUSTER_DOUBLED = 9, 1  # of a cluster that reduces a row, and for each doubling of its CTAs


def eviction(facts: RowFacts) -> int:
    """The knob `eviction`, by the bytes moved. Tuning does not choose it.

    If rows are evicted first, a part of an earlier replay's rows stays in the L2. So timing by replay overrates this
    for memory much larger than the L2."""
    whole = (*facts.program.read_whole, *facts.program.written_whole)
    moved = sum(view.dtype.nbytes(facts.columns) * _rows(facts, view) for view in whole)
    if moved <= _CACHED:
        return AS_USUAL
    return ALL_FIRST if moved <= _SMALL else READS_LAST


def _rows(facts: RowFacts, view: View) -> int:
    """Number of a tensor's rows in memory. Axes of stride 0, as of a weight for each head, do not count."""
    return math.prod(e for e, stride in zip(facts.row_extents, view.row_strides, strict=True) if stride)


def pays_ahead(split: ByRowSplit, device: Device) -> Callable[[ByRowKnobs], bool]:
    """Function that returns whether reading all inputs before the first reduction is faster with some knobs.

    If there is much computation with column vectors, and an SM has many rows, it is faster to leave registers for more
    resident rows."""
    program, rows = split.facts.program, split.facts.rows
    if any(view.place.numbers for view in program.inputs):  # reads wait for a read
        return lambda knobs: True
    made = (k for k, first in enumerate(program.earliest) if first == program.last and program.extents[k].columns)
    steps = [program.steps[k] for k in made if Chain(k) not in program.one_a_part]
    computed = sum(_COMPUTED[cost_of(step)] + (step.rounded is not None) for step in steps)
    vectors = sum(view.columns and not view.rows for view in program.inputs)
    if computed * vectors >= _CROWDED and rows > _MANY_ROWS * device.sm_count:
        return lambda knobs: False
    return lambda knobs: split.steps(knobs) * split.piece(knobs) in _READ_AHEAD


def is_usual(knobs: ByRowKnobs) -> bool:
    """True if CTAs have a size that may be fast. Small CTAs wait less at barriers, but each takes time to start. For
    long rows, the largest CTAs may be fast, too."""
    if knobs.cluster > 1:
        return knobs.threads >= 64
    whole = knobs.threads == MAX_THREADS and knobs.threads_per_row >= 256
    return whole or knobs.threads == max(knobs.threads_per_row, 128)


def cost(split: ByRowSplit, device: Device) -> Callable[[ByRowKnobs], float]:
    """Function that estimates the nanoseconds of a launch from its knobs.

    It is a sum of two parts. Throughput: the longest of memory, instructions and CTA starts, a share of the
    instructions that memory does not hide, and the exchange within clusters. Latency: a launch on an idle device, with
    a thread's elements and the reduction. Both are fitted to exhaustive searches on an H200, over random sizes and over
    rows with a residual or many columns (docs/tuning.md). The fit is for the order of knobs: estimates are longer than
    measured times, most of all for small launches.
    """
    facts, program = split.facts, split.facts.program
    phases, reductions = program.last + 1, split.sums + split.maxima
    read, written = ([view.dtype.bits for view in views] for views in (program.read_whole, program.written_whole))
    narrowest, more = min(written, default=32), max(0, len(read) - 1)
    start, each = next(figures for most, figures in _INSTRUCTIONS.items() if narrowest <= most)
    start += _AXIS * (len(facts.row_extents) - 1)
    start += _CHOSEN * sum(bool(view.place.kind) for view in program.all_views)
    block = max(program.block_sizes, default=0)
    whole, again = (facts.columns * (sum(read) * times + sum(written)) / 8 for times in (1, phases))

    has_read_again = any(_rows(facts, view) < facts.rows for view in program.read_whole)

    @cache
    def served(threads: int, piece: int) -> float:
        """Nanoseconds that the L1 needs for a row beyond those of memory, where it has rows that others read, too."""
        if not has_read_again:
            return 0.0
        lines = moved = 0.0
        for view in (*program.read_whole, *program.written_whole):
            row, together = view.dtype.nbytes(facts.columns), threads * min(_ACCESS, view.dtype.nbytes(piece))
            lines += row / min(_LINE, together)
            moved += row * _rows(facts, view) / facts.rows
        return max(0.0, _SERVED * lines - moved / _BYTES)

    @cache
    def read_per_used(threads: int, piece: int) -> float:
        """Ratio of the bytes in accessed sectors to the used bytes."""
        return max(1.0, _SECTOR / (threads * min((v.dtype.nbytes(piece) for v in program.read_whole), default=_SECTOR)))

    def nanoseconds(knobs: ByRowKnobs) -> float:
        threads, piece, resident = knobs.threads_per_row, split.piece(knobs), split.resident(knobs)
        elements = split.steps(knobs) * piece if resident else facts.columns / threads * phases
        parts = _PART * len(program.parts) * elements / piece
        instructions = each * threads * (start + elements + parts)
        instructions *= (1 + _DOUBLED * max(0.0, math.log2(threads / WARP))) * (1 + _MORE_READ * more)
        instructions *= 1 + _WIDE * math.log2(knobs.chunks)
        if program.parts and elements > _MANY_ELEMENTS:
            instructions *= _PART_OF_MANY
        if piece < block:
            instructions *= _SHARED_BLOCK
        moved = (whole if resident else again) / _BYTES
        ctas = threads / knobs.threads
        busy = max(moved * read_per_used(threads, piece), instructions, _CTA_AT_LEAST * ctas) + _CTA * ctas
        busy += _BESIDE * instructions + served(threads, piece)
        idle = _LAUNCH + (elements + parts) * (_AHEAD if knobs.ahead else 1) * (1 + _MORE_AWAITED * more)
        idle += (_ROUND + (_MEETING if program.groups else 0)) * math.log2(threads)
        idle += _ROW_WARP * max(1.0, min(threads, knobs.threads) / WARP)
        idle += _CTA_WARP * knobs.threads / WARP
        if knobs.cluster > 1:
            busy += _MESSAGE * reductions * threads * (knobs.cluster - 1)
            idle += reductions * (_CLUSTER + _CLUSTER_DOUBLED * math.log2(knobs.cluster))
        return max(facts.rows / device.sm_count, _LONE / knobs.cluster) * busy + _ELEMENT * idle

    return nanoseconds
