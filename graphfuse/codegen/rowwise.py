"""Printing of a row program as C++: the generated part of a kernel template for rows.

The template spreads rows over threads, and reduces. Everything that depends on the program is printed here: kernel
parameters, addresses, and what each phase reads, computes, keeps and writes. The text never contains names of the
user's tensors.
"""

from collections.abc import Iterator

from graphfuse.base import settings
from graphfuse.base.dtypes import SMALL_INTEGERS, data_type
from graphfuse.codegen import addresses, declarations, elements, parameters, per_row, phases, ranks, stores, sums
from graphfuse.codegen.check_plan import check_plan
from graphfuse.codegen.copies import copies
from graphfuse.codegen.phase_plan import PhasePlan, is_narrow
from graphfuse.ops import OPS
from graphfuse.rows.program import RowProgram
from graphfuse.rows.steps import Pick


def headers(program: RowProgram) -> Iterator[str]:
    """Headers that the printed text needs in addition to those of kernel templates, for inclusion at global scope."""
    yield from stores.headers(program)
    forms = (OPS[step.op_name].cuda or "" for step in program.steps if step.op_name in OPS)
    yield from sorted({name for form in forms for name in declarations.headers(form)})
    if any(operand.dtype.facts.integers for operand in (*program.inputs, *program.scalars)):
        yield "integers.cuh"
    if not {*SMALL_INTEGERS}.isdisjoint(_types(program)):
        yield "small_integers.cuh"
    if any(isinstance(step, Pick) for step in program.steps):
        yield "element.cuh"
    if program.indices:
        yield "indices.cuh"
    if any(map(is_narrow, program.steps)):
        yield "packed.cuh"
    if program.parts:
        yield "parts.cuh"
    if program.all_pairs or any(view.place.numbers for view in program.inputs):
        yield "pairs.cuh"


def _types(program: RowProgram) -> Iterator[data_type | None]:
    """Types in which values are read, rounded and written."""
    yield from (view.dtype for view in (*program.inputs, *(store.view for store in program.stores)))
    yield from (step.rounded for step in program.steps)


def source(plan: PhasePlan, kernel: str) -> str:
    """The generated text of a kernel: the structs Arguments, Row, Operands, PerRow, Held and Phase with their
    functions, and the kernel function. With `stages`, also copies and sums over rows. kernel: qualifiers, in C++."""
    if settings.verify():
        check_plan(plan)
    return "\n".join([*_lines(plan), *parameters.entry(plan, kernel)]) + "\n"


def _lines(plan: PhasePlan) -> Iterator[str]:
    copied = copies(plan)
    yield f"constexpr int LAST_PHASE = {plan.program.last};"
    yield f"constexpr int AMAXES = {max(len(stores.amaxes(plan.program)), 1)};"
    yield from parameters.source(plan)
    if plan.stages:
        yield f"constexpr int STAGES = {plan.stages};"
        yield from copied.source()
    if not plan.stages and not plan.across:
        yield from ranks.source(plan)
    yield from addresses.source(plan, copied.places)
    yield from per_row.source(plan, copied)
    yield from elements.held(plan)
    if plan.stages:
        yield from sums.source(plan)
    yield from phases.source(plan, copied)
    yield from stores.raised(plan)
