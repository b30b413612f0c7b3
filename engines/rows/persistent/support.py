"""Which problems the engine takes."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.rows.persistent.knobs import every_knob
from graphfuse.engines.rows.persistent.legal import fits
from graphfuse.engines.rows.persistent.split import RowSplit
from graphfuse.engines.rows.support import FLOATS, program_reasons, tensor_reasons, view_reasons
from graphfuse.patterns.rows import RowFacts


def reasons(facts: RowFacts, device: Device) -> Iterator[str]:
    yield from program_reasons(facts, device)
    yield from tensor_reasons(facts)
    for s in facts.program.sums:
        yield from view_reasons(facts, "sum over rows", s.view, FLOATS, facts.columns, 0)
        if s.view.alignment % s.view.dtype.nbytes(1):
            yield (
                f"sum over rows {s.view.name!r} is aligned to {s.view.alignment} bytes; "
                f"accepted: a multiple of {s.view.dtype.nbytes(1)}"
            )
    split = RowSplit.of(facts)
    if not any(fits(split, knobs, device) for knobs in every_knob(split.pieces, device)):
        yield f"{facts.node}: no way to spread rows of {facts.columns} columns over the threads of {device}"
