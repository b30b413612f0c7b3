"""Which problems the engine takes."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.rmsnorm_backward.knobs import every_knob
from graphfuse.engines.rmsnorm_backward.legal import fits
from graphfuse.engines.rmsnorm_backward.split import RowSplit
from graphfuse.engines.support import (
    FLOATS,
    device_reasons,
    one_reason,
    rounding_reasons,
    tensor_reasons,
    view_reasons,
)
from graphfuse.patterns.rmsnorm_backward import RmsNormBackwardFacts
from graphfuse.rowwise import ROW_MEAN, reduced


def reasons(facts: RmsNormBackwardFacts, device: Device) -> Iterator[str]:
    yield from device_reasons(device)
    yield from _program_reasons(facts)
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


def _program_reasons(facts: RmsNormBackwardFacts) -> Iterator[str]:
    program = facts.program
    yield from rounding_reasons(program)
    yield from one_reason(facts, ROW_MEAN)
    for step in program.steps:
        if step.op_name == ROW_MEAN and not all(program.extent(o).columns for o in reduced(step)):
            yield f"{facts.node}: gradient and input must vary over columns"
    if program.last != 1:
        yield f"{facts.node}: {program.last} means of a row follow one another; accepted: 1"
    if any(number not in dict(program.summed_in(0)) for number in range(len(program.sums))):
        yield f"{facts.node}: a sum over rows of what depends on the mean of a row"
