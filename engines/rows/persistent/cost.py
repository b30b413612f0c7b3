"""Cost model: estimates the time of a launch, to rank knobs that were not measured."""

import math
from collections.abc import Callable

from graphfuse.base.device import Device
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs
from graphfuse.engines.rows.persistent.split import PersistentSplit
from graphfuse.ops import Cost
from graphfuse.rows.program import RowProgram, cost_of

# Nanoseconds, fitted to searches on an H200 over the sizes of docs/records/rmsnorm-backward-nvidia-h200.json.
BYTES = 31.6  # bytes that memory moves for an SM in a nanosecond
ISSUED = 7.0  # warp instructions that an SM issues in a nanosecond
_ROW = 200.0  # warp instructions of a row
_STEP, _FUNCTION, _OPERAND = 1.4, 4.2, 0.9  # warp instructions of an element's cheap step, function, input or output
LATENCY = 750.0  # of a memory read
_ANSWERS = 2  # consecutive reads that a pass waits for without prefetch
_MEETING, _WARP = 370.0, 24.0  # of a reduction over the threads of a row, and of each of their warps
_CLUSTER = 100.0  # for each doubling of a cluster's CTAs
_HIDDEN = 0.5  # the part of _CLUSTER that the knob `delay` hides
_APART = 8.0  # bytes by which each access of a row's threads seems longer, as rows are on different cache lines
_ELEMENT = 5.0  # latency of each element of a thread
CTA = 58.0  # of a round, for each CTA on an SM
_START = 2840.0  # of a launch
_FILLED = 4.9e-3  # for each byte of the first copies
_PARTIAL = 2.2e-4  # for each byte of partial sums
_SUM = 8  # bytes per column that each row reads and writes for sums over rows, if rows are read again
_SHARPNESS = 4.0  # exponent of the norm that approximates the maximum of several times


def instructions(program: RowProgram) -> float:
    """Number of instructions of an element."""
    each = sum(_FUNCTION if cost_of(step) is Cost.FUNCTION else _STEP for step in program.elementwise)
    return each + _OPERAND * (len(program.inputs) + len(program.stores) + len(program.sums))


def longest(*times: float) -> float:
    """A smooth maximum of several times, of which the longest hides the others."""
    return sum(time**_SHARPNESS for time in times) ** (1 / _SHARPNESS)


def cost(split: PersistentSplit, device: Device) -> Callable[[PersistentKnobs], float]:
    """Function that estimates the nanoseconds of a launch from its knobs, as a sum of rounds.

    In a round, each CTA processes the rows that it has at a time. It takes the longest of four times: memory moves its
    bytes; an SM issues the instructions of all warps; the threads of a CTA execute their dependent steps; a copy
    arrives, divided by the number of rounds that are prefetched. Nothing hides the last round.
    """
    facts, program = split.facts, split.facts.program
    read = sum(view.dtype.nbytes(facts.columns) for view in program.read_whole)
    narrowest = min((view.dtype.bits / 8 for view in program.read_whole), default=4)
    whole = read + sum(view.dtype.nbytes(facts.columns) for view in program.written_whole)
    again = whole + read + _SUM * facts.columns * len(program.sums)
    each = instructions(program)

    def spread(knobs: PersistentKnobs) -> tuple[int, int, int, float, float]:
        """Figures that do not depend on the number of stages: CTAs, passes, elements of a thread, and nanoseconds to
        move bytes and to issue instructions."""
        ctas, passes = split.by_rows(knobs).grid(facts.rows), split.passes(knobs)
        per_sm, nbytes = ctas / device.sm_count, whole if split.resident(knobs) else again
        elements = split.steps(knobs) * passes * split.piece
        warps = knobs.rows_per_cta * max(1.0, per_sm) / knobs.cluster * knobs.threads_per_row / WARP
        moved = nbytes * knobs.rows_per_cta / knobs.cluster * per_sm / BYTES
        moved *= 1 + _APART / (knobs.threads_per_row * split.piece * narrowest)
        return ctas, passes, elements, moved, warps * (_ROW + each * elements) / ISSUED

    known: dict[tuple[object, ...], tuple[int, int, int, float, float]] = {}

    def nanoseconds(knobs: PersistentKnobs) -> float:
        key = knobs.threads_per_row, knobs.threads, knobs.ctas_per_sm, knobs.ctas, knobs.stages > 1
        ctas, passes, elements, moved, busy = known.get(key) or known.setdefault(key, spread(knobs))
        per_sm = ctas / device.sm_count
        rounds = -(-facts.rows // max(1, ctas // knobs.cluster * knobs.rows_per_cta))
        alone = _MEETING + _WARP * min(knobs.threads_per_row, knobs.threads) / WARP + _ELEMENT * elements
        alone += _CLUSTER * math.log2(knobs.cluster) * (1 - _HIDDEN * knobs.delay)
        ahead = knobs.stages - 1 - knobs.delay if knobs.stages > 1 and split.copies_all else 0
        awaited = LATENCY / ahead if ahead else 0.0
        alone += 0.0 if ahead else _ANSWERS * LATENCY * passes
        round_time = longest(moved, busy, alone, awaited)
        spent = _START + rounds * (round_time + CTA * max(1.0, per_sm)) + alone + busy
        spent += _FILLED * ahead * split.stage_bytes(knobs) * max(1.0, per_sm) if ahead else 0.0
        return spent + _PARTIAL * (ctas // knobs.cluster * split.sum_bytes)

    return nanoseconds
