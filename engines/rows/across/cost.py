"""Cost model: estimates the time of a launch, to rank knobs that were not measured."""

from collections.abc import Callable, Sequence

from graphfuse.base.device import Device
from graphfuse.engines.rows.across.knobs import AcrossKnobs
from graphfuse.engines.rows.across.split import AcrossSplit
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.persistent.cost import BYTES, CTA, ISSUED, LATENCY, instructions, longest
from graphfuse.engines.rows.schedule import PROPOSED

# Nanoseconds. Constants imported from `persistent` are fitted, the others are estimates. Measured times of the three
# sizes of docs/records/rmsnorm-channels-nvidia-h200.json are within 7 % of the model.
_MEETINGS = 2  # barriers of a reduction, for groups that share a row
_MEETING, _WARP = 120.0, 8.0  # of a barrier, and of each warp of a CTA at it
_ELEMENT = 2.0  # latency of each element of a thread
_START = 2000.0  # of a launch
_LAST = 0.5  # lost part of the time in which some SMs are idle in the last round
_RUN, _SHORT = 256, 0.1  # contiguous bytes that memory moves best, and the loss for each halving

# Minimum of threads on an SM that keep its memory busy, of threads of a CTA, and of threads along neighbouring rows.
_LEAST_THREADS, _LEAST_CTA, _LEAST_ACROSS = 384, 96, 16


def usual(split: AcrossSplit, every: Sequence[AcrossKnobs]) -> list[AcrossKnobs]:
    """Knobs that may be fast: those that read rows once, if there are any.

    As long as enough remain, they also have enough threads to keep memory busy, CTAs that are not too small, and
    contiguous accesses of several sectors."""
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
    """Function that estimates the nanoseconds of a launch from its knobs, as a sum of rounds of resident CTAs.

    A round takes the longest of three times: memory moves its bytes; an SM issues the instructions of all warps; a
    thread reads, waits for the other groups, and writes.
    """
    facts, program = split.facts, split.facts.program
    written = sum(view.dtype.bits / 8 for view in program.written_whole)
    each = instructions(program)

    def nanoseconds(knobs: AcrossKnobs) -> float:
        plan, passes, rows = split.plan(knobs), split.passes(knobs), knobs.threads_across * split.piece
        ctas = split.by_rows(knobs).grid(facts.rows)
        per_sm = min(float(knobs.ctas_per_sm), max(1.0, ctas / device.sm_count))
        rounds = max(1.0, ctas / (device.sm_count * knobs.ctas_per_sm))
        last = -(-rounds // 1) - rounds  # idle part of the last round
        read = sum(plan.read_bytes(phase, True) for phase in plan.phases)
        run = min((view.dtype.nbytes(rows) for view in program.read_whole), default=_RUN)
        halvings = max(0, (_RUN // max(run, 1)).bit_length() - 1)
        moved = per_sm * rows * facts.columns * (read + written) * (1 + _SHORT * halvings) / BYTES
        elements = split.steps(knobs) * passes * split.chunk * split.piece
        phases = 1 if split.resident(knobs) else len(plan.phases)
        busy = per_sm * knobs.threads / WARP * each * elements * phases / ISSUED
        alone = LATENCY * (1 + passes * phases) + _ELEMENT * elements
        alone += program.last * _MEETINGS * (_MEETING + _WARP * knobs.threads / WARP) * (knobs.groups > 1)
        return _START + (rounds + _LAST * last) * (longest(moved, busy, alone) + CTA * per_sm)

    return nanoseconds
