"""Cost model: estimates the time of a launch, to rank knobs that were not measured."""

from collections.abc import Callable

from graphfuse.base.device import Device
from graphfuse.engines.rows.limits import WARP
from graphfuse.engines.rows.over_grid.knobs import OverGridKnobs
from graphfuse.engines.rows.over_grid.split import OverGridSplit
from graphfuse.engines.rows.persistent.cost import BYTES, ISSUED, instructions

# Nanoseconds. Constants imported from `persistent` are fitted, the others are estimates.
_ELEMENT = 5.0  # latency of each element of a thread
_PASS = 400.0  # of a pass, which waits for its reads while nothing else is moved
_START = 3500.0  # of a cooperative launch
_MEETING, _WARP, _CTA = 1500.0, 4.0, 2.0  # of a grid barrier; in addition for each warp of a CTA, and for each CTA


def cost(split: OverGridSplit, device: Device) -> Callable[[OverGridKnobs], float]:
    """Function that estimates the nanoseconds of a launch from its knobs: the time of the SM with the most CTAs, and
    grid barriers."""
    facts, program = split.facts, split.facts.program
    read, written = (
        sum(view.dtype.nbytes(facts.columns) for view in views) for views in (program.read_whole, program.written_whole)
    )
    each = instructions(program)

    def nanoseconds(knobs: OverGridKnobs) -> float:
        ctas = facts.rows * knobs.ctas_per_row
        on_sm, times = -(-ctas // device.sm_count), 1 if split.resident(knobs) else program.last + 1
        moved = on_sm / knobs.ctas_per_row * (read * times + written) / BYTES
        elements = split.per_thread(knobs) * split.piece * times
        busy = on_sm * knobs.threads / WARP * each * elements / ISSUED
        alone = split.passes(knobs) * times * _PASS + elements * _ELEMENT
        met = _MEETING + _WARP * knobs.threads / WARP + _CTA * ctas
        return _START + max(moved, busy) + alone + program.last * met

    return nanoseconds
