"""Cost model: estimates the time of a launch, to rank knobs that were not measured."""

from collections.abc import Sequence

from graphfuse.device import Device
from graphfuse.engines.rows.across.knobs import AcrossKnobs
from graphfuse.engines.rows.across.split import RowSplit
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.schedule import PROPOSED
from graphfuse.ops import Cost
from graphfuse.rows.program import cost_of

# Nanoseconds, and an SM's work in one. The figures fitted for `persistent`; not yet fitted here.
_BYTES = 31.6  # bytes that memory moves for an SM in a nanosecond
_ISSUED = 7.0  # warp instructions that an SM issues in a nanosecond
_LATENCY = 750.0  # of a memory read
_MEETING, _WARP = 120.0, 8.0  # of a barrier, and for each warp of a CTA
_ELEMENT = 2.0  # latency of each element of a thread
_CTA = 58.0  # to start one
_START = 2000.0  # of a launch
_STEP, _FUNCTION, _OPERAND = 1.4, 4.2, 0.9  # instructions per element: of a cheap step, of a function, of an operand
_RUN, _SHORT = 256, 0.1  # contiguous bytes that memory moves best, and the loss for each halving
_SHARPNESS = 4.0  # exponent of the norm by which the longest of several times hides the others

# Threads of an SM that keep its memory busy, of a CTA, and side by side along rows.
_LEAST_THREADS, _LEAST_CTA, _LEAST_ACROSS = 384, 96, 16


def usual(split: RowSplit, every: Sequence[AcrossKnobs]) -> list[AcrossKnobs]:
    """Those that may pay: with rows that are read once, if any are; as long as enough are left to choose from, with as
    many threads as read at the same time what memory moves meanwhile, with CTAs that do not start all the time, and
    with runs of several sectors."""
    found = [knobs for knobs in every if split.resident(knobs)] or [*every]
    for pays in (
        lambda knobs: knobs.threads * knobs.ctas_per_sm >= _LEAST_THREADS,
        lambda knobs: knobs.threads >= _LEAST_CTA,
        lambda knobs: knobs.threads_across >= _LEAST_ACROSS,
    ):
        fewer = [knobs for knobs in found if pays(knobs)]
        if len({knobs.spread for knobs in fewer}) >= PROPOSED:
            found = fewer
    return found


def cost(split: RowSplit, knobs: AcrossKnobs, device: Device) -> float:
    """Nanoseconds, of rounds in each of which an SM has the CTAs that it can hold.

    A round takes what memory needs to move its bytes, or the instructions of all warps, or what a thread does one after
    the other: it reads, meets the other groups, and writes.
    """
    facts, program = split.facts, split.facts.program
    resident, rows = split.resident(knobs), knobs.threads_across * split.piece
    ctas = split.by_rows(knobs).grid(facts.rows)
    per_sm = min(float(knobs.ctas_per_sm), max(1.0, ctas / device.sm_count))
    rounds = max(1.0, ctas / (device.sm_count * knobs.ctas_per_sm))
    last = -(-rounds // 1) - rounds  # of the last round, what nothing runs in
    plan = split.plan(knobs)
    read = sum(plan.read_bytes(phase, True) for phase in plan.phases)
    written = sum(view.dtype.bits / 8 for view in program.written_whole)
    run = min((view.dtype.nbytes(rows) for view in program.read_whole), default=_RUN)
    halvings = max(0, (_RUN // max(run, 1)).bit_length() - 1)
    moved = per_sm * rows * facts.columns * (read + written) * (1 + _SHORT * halvings) / _BYTES
    each = sum(_FUNCTION if cost_of(step) is Cost.FUNCTION else _STEP for step in program.elementwise)
    each += _OPERAND * (len(program.inputs) + len(program.stores))
    taken = split.steps(knobs) * split.passes(knobs) * split.chunk * split.piece  # of a thread
    phases = 1 if resident else len(plan.phases)
    busy = per_sm * knobs.threads / WARP * each * taken * phases / _ISSUED
    reductions = len(plan.phases) - 1
    alone = _LATENCY * (1 + split.passes(knobs) * phases) + _ELEMENT * taken
    alone += reductions * 2 * (_MEETING + _WARP * knobs.threads / WARP) * (knobs.groups > 1)
    at_once = (moved**_SHARPNESS + busy**_SHARPNESS + alone**_SHARPNESS) ** (1 / _SHARPNESS)
    return _START + (rounds + 0.5 * last) * (at_once + _CTA * per_sm)
