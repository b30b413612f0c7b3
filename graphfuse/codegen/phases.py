"""Prints phases: what each reads of a piece, and what it makes of that."""

from collections.abc import Iterator, Sequence

from graphfuse.codegen.copies import Copies
from graphfuse.codegen.elements import Elements, packed_type
from graphfuse.codegen.per_row import maxima
from graphfuse.codegen.phase_plan import PHASES, PhasePlan, access
from graphfuse.codegen.stores import stored
from graphfuse.codegen.sums import added
from graphfuse.enums import reduction_mode
from graphfuse.ops import REDUCTIONS
from graphfuse.rowwise import AMAX, reduced
from graphfuse.steps import Load


def source(plan: PhasePlan, copies: Copies) -> Iterator[str]:
    """The structs Phase0 to Phase2."""
    for phase in PHASES:
        exists = phase <= plan.program.last
        yield ""
        yield f"struct Phase{phase} {{"
        yield from _reads(plan, copies, "Rows", plan.reads(phase, True) if exists else ())
        yield from _reads(plan, copies, "Columns", plan.reads(phase, False) if exists else ())
        if exists:
            yield from _run(Elements(plan, phase))
        yield "};"


def _reads(plan: PhasePlan, copies: Copies, kind: str, inputs: Sequence[int]) -> Iterator[str]:
    """kind: Rows, or Columns."""
    yield f"  struct {kind} {{"
    yield from (f"    {packed_type(plan, Load(i))} r{i};" for i in inputs)
    yield "  };"
    sizes = {i: plan.program.inputs[i].dtype.nbytes(plan.piece) for i in inputs}
    if kind == "Rows":
        yield "  GF_DEVICE static Rows any_rows() {"
        yield "    return {" + ", ".join(f"gf::any_bytes<{size}>()" for size in sizes.values()) + "};"
        yield "  }"
    yield f"  GF_DEVICE static {kind} read_{kind.lower()}(const Row& row, Index at) {{"
    yield "    (void)row, (void)at;"
    loads = []
    for i, size in sizes.items():
        copied, width = copies.named(f"i{i}"), access(plan.program.inputs[i], plan.piece)
        # Only what nothing writes meanwhile: a row may be overwritten by the output.
        how = "ROW_READS" if kind == "Rows" else "COLUMN_READS"
        load = f"gf::load<{size}, {width}, {how}>(gf::offset(row.i{i}, at * {size}))"
        loads.append(copied.piece_read if copied else load)
    yield "    return {" + ",\n            ".join(loads) + "};"
    yield "  }"


def _run(elements: Elements) -> Iterator[str]:
    plan, program, phase = elements.plan, elements.program, elements.phase
    largest = maxima(program, phase)
    summed = [reduced(step) for _, step in program.reduced_after(phase) if step.op_name != AMAX]
    factors = "".join(f", float (&{name})[PIECE]" for name in "xy"[: max(map(len, summed), default=0)])
    sums = ", Sums& sums" * bool(plan.stages and not phase)
    yield "  GF_DEVICE static void run(const Row& row, Index at, bool inside, const Rows& rows,"
    yield "                            const Columns& columns, Held& held, const Operands& s, const PerRow& p,"
    maximal = f"float (&maxima)[{max(len(largest), 1)}]"
    yield f"                            float (&largest)[AMAXES], {maximal}{factors}{sums}) {{"
    yield "    (void)row, (void)at, (void)inside, (void)rows, (void)columns, (void)held, (void)s, (void)p;"
    yield "    (void)largest, (void)maxima;"
    yield from elements.source()
    for operands in summed:
        copied = ", ".join(f"{to}[i] = {elements.array(o)}[i]" for to, o in zip("xy", operands, strict=False))
        yield "#pragma unroll"
        yield "    for (int i = 0; i < PIECE; ++i) {"
        yield f"      {copied};"
        yield "    }"
    yield from added(elements)
    for number, k in enumerate(largest):
        (o,) = reduced(program.steps[k])
        at = f"maxima[{number}]"
        folded = REDUCTIONS[reduction_mode.AMAX].fold.format(to=at, values=elements.array(o))
        yield f"    {at} = inside ? {folded} : {at};"
    yield from stored(elements)
    yield "  }"
