"""What a launch takes, by which knobs are compared before anything was measured."""

import math

from graphfuse.device import Device
from graphfuse.engines.limits import WARP
from graphfuse.engines.rmsnorm_backward.knobs import RmsNormBackwardKnobs
from graphfuse.engines.rmsnorm_backward.row import Row

# Nanoseconds, set so that the best knobs of a prototype on an H200 come first.
_BYTES = 32.0  # that memory moves for an SM in one
_LATENCY = 1800.0  # from a read's start to its end, while all SMs read
_ROW = 450.0  # of a row in a CTA: barrier, reduction, addresses
_WARP = 8.0  # for each warp that takes part in the reduction
_CLUSTER = 500.0  # for each doubling of the CTAs of a cluster, which meet for each row
_STEP = 4.0  # of each step of the program on 512 elements: a sixteenth of what an SM's threads do at once
_FUNCTION = 12.0  # likewise where it is no arithmetic alone
_START, _END = 1500.0, 1500.0  # of a launch; of the grid's barrier and the sums over rows
_PARTIAL = 0.0004  # of each byte of partial sums
_ARITHMETIC = ("add", "mul", "sub", "scale", "neg", "identity", "row_mean", "gradient")


def cost(row: Row, knobs: RmsNormBackwardKnobs, device: Device) -> float:
    """Nanoseconds, of rounds in each of which each CTA takes the rows that it takes at a time.

    A round takes what memory needs to move its bytes, or what passes from the start of a copy to its end, shared by as
    many rounds as copies are ahead, or what the threads of one CTA do one after another, or those of all of an SM.
    """
    facts, program = row.facts, row.facts.program
    ctas, resident = row.ctas(knobs), row.resident(knobs)
    per_sm = max(1.0, min(knobs.ctas_per_sm, ctas / device.sm_count))
    rounds = -(-facts.rows // max(1, ctas // knobs.cluster * knobs.rows_per_cta))
    read, written = (
        sum(view.dtype.nbytes(facts.columns) for view in views) for views in (program.read_whole, program.written_whole)
    )
    if not resident:
        read, written = (
            2 * read + 4 * facts.columns * len(program.sums),
            written + 4 * facts.columns * len(program.sums),
        )
    moved = (read + written) * knobs.rows_per_cta / knobs.cluster * per_sm / _BYTES
    elements = row.steps(knobs) * row.passes(knobs) * row.piece
    each = sum(_STEP if step.op_name in _ARITHMETIC else _FUNCTION for step in program.steps)
    busy = elements * each * max(1.0, knobs.threads / 512)
    waits = _ROW + _WARP * min(knobs.threads_per_row, knobs.threads) / WARP + _CLUSTER * math.log2(knobs.cluster)
    copied = knobs.stages > 1 and row.copies_all
    awaited = _LATENCY / (knobs.stages - 1) if copied else 2 * _LATENCY * row.passes(knobs) + waits + busy
    # What takes less time is not hidden all of the time, and nothing hides the last round.
    spent = _START + waits + busy
    spent += rounds * (max(moved, awaited, waits + busy, per_sm * busy) + 0.1 * (awaited + waits) + 0.2 * busy)
    if program.sums:
        spent += _END + row.partial_bytes(knobs) * _PARTIAL + 4 * knobs.rows_per_cta
    return spent
