"""Cost model: estimates the time of a launch, to rank knobs that were not measured."""

from collections.abc import Callable, Sequence

from graphfuse.base.device import Device
from graphfuse.engines.rows.across.knobs import AcrossKnobs
from graphfuse.engines.rows.across.split import AcrossSplit
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.persistent.cost import BYTES, CTA, ISSUED, LATENCY, instructions, longest
from graphfuse.engines.rows.schedule import PROPOSED

# Nanoseconds. No search fitted them: beside those of the model of `persistent` they are estimates. What the three sizes
# of docs/records/rmsnorm-channels-nvidia-h200.json took is within 7 % of them.
_MEETINGS = 2  # barriers of a reduction, for groups that share a row
_MEETING, _WARP = 120.0, 8.0  # of a barrier, and for each warp of a CTA
_ELEMENT = 2.0  # latency of each element of a thread
_START = 2000.0  # of a launch
_LAST = 0.5  # part of the time in which nothing runs on some SMs in the last round, which is lost
_RUN, _SHORT = 256, 0.1  # contiguous bytes that memory moves best, and the loss for each halving

# Threads of an SM that keep its memory busy, of a CTA, and side by side along rows.
_LEAST_THREADS, _LEAST_CTA, _LEAST_ACROSS = 384, 96, 16


def usual(split: AcrossSplit, every: Sequence[AcrossKnobs]) -> list[AcrossKnobs]:
    """Knobs that may pay: with rows that are read once, if any are; as long as enough are left to choose from, with as
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


def cost(split: AcrossSplit, device: Device) -> Callable[[AcrossKnobs], float]:
    """Nanoseconds of a launch, by its knobs: of rounds in each of which an SM has the CTAs that it can hold.

    A round takes what memory needs to move its bytes, or the instructions of all warps, or what a thread does one after
    the other: it reads, meets the other groups, and writes.
    """
    facts, program = split.facts, split.facts.program
    written = sum(view.dtype.bits / 8 for view in program.written_whole)
    each = instructions(program)

    def nanoseconds(knobs: AcrossKnobs) -> float:
        plan, passes, rows = split.plan(knobs), split.passes(knobs), knobs.threads_across * split.piece
        ctas = split.by_rows(knobs).grid(facts.rows)
        per_sm = min(float(knobs.ctas_per_sm), max(1.0, ctas / device.sm_count))
        rounds = max(1.0, ctas / (device.sm_count * knobs.ctas_per_sm))
        last = -(-rounds // 1) - rounds  # of the last round, what nothing runs in
        read = sum(plan.read_bytes(phase, True) for phase in plan.phases)
        run = min((view.dtype.nbytes(rows) for view in program.read_whole), default=_RUN)
        halvings = max(0, (_RUN // max(run, 1)).bit_length() - 1)
        moved = per_sm * rows * facts.columns * (read + written) * (1 + _SHORT * halvings) / BYTES
        taken = split.steps(knobs) * passes * split.chunk * split.piece  # of a thread
        phases = 1 if split.resident(knobs) else len(plan.phases)
        busy = per_sm * knobs.threads / WARP * each * taken * phases / ISSUED
        alone = LATENCY * (1 + passes * phases) + _ELEMENT * taken
        alone += program.last * _MEETINGS * (_MEETING + _WARP * knobs.threads / WARP) * (knobs.groups > 1)
        return _START + (rounds + _LAST * last) * (longest(moved, busy, alone) + CTA * per_sm)

    return nanoseconds
