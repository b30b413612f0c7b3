"""Which problems the engine takes."""

from collections.abc import Iterator

from graphfuse.device import Device
from graphfuse.engines.limits import MAX_THREADS, static_faults
from graphfuse.engines.rmsnorm.cost import is_usual
from graphfuse.engines.rmsnorm.knobs import RmsNormKnobs, every_knob
from graphfuse.engines.rmsnorm.legal import faults
from graphfuse.engines.rmsnorm.split import RowSplit
from graphfuse.engines.support import device_reasons, one_reason, rounding_reasons, tensor_reasons
from graphfuse.patterns.rmsnorm import RmsNormFacts
from graphfuse.rowwise import AMAX, INVERSE_RMS


def reasons(facts: RmsNormFacts, device: Device) -> Iterator[str]:
    yield from device_reasons(device)
    yield from _program_reasons(facts)
    yield from tensor_reasons(facts)
    split = RowSplit.of(facts)
    if not any(next(faults(facts, split, knobs, device), None) is None for knobs in filter(is_usual, every_knob())):
        longest = RmsNormKnobs(MAX_THREADS, MAX_THREADS)  # what rows of any length take
        shared = next(static_faults(split.static_bytes(longest)), None)
        yield (
            f"{split.maxima} largest magnitudes of a row: {shared}"
            if shared
            else f"{facts.rows} rows take more CTAs than a grid can have"
        )


def _program_reasons(facts: RmsNormFacts) -> Iterator[str]:
    program = facts.program
    if not program.extent(facts.input).columns:
        yield f"{facts.node}: the input does not vary over columns"
    yield from rounding_reasons(program)
    for k, step in enumerate(program.steps):
        operands = dict(step.operands)
        if step.op_name == INVERSE_RMS and program.extent(operands["epsilon"]).columns:
            yield f"{facts.node}: epsilon is a value of the rows; accepted: one that is the same for all elements"
        if step.op_name == AMAX and not program.extent(operands["input"]).columns:
            yield "the largest magnitude of what is one a row; accepted: of values that vary over columns"
        if step.op_name == INVERSE_RMS and program.earliest[k] != 1:
            yield f"{facts.node}: normalizes what depends on the largest magnitude of a row; accepted: pointwise values"
    yield from one_reason(facts, INVERSE_RMS, beside=(AMAX,))
    if program.last > 2:
        yield f"{facts.node}: {program.last} reductions of a row follow one another; accepted: 2"
