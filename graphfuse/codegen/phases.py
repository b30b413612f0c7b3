"""Printing of phases: the reads of a piece, and its computation."""

from collections.abc import Iterator, Sequence

from graphfuse.base.enums import reduction_mode
from graphfuse.codegen import pieces
from graphfuse.codegen.copies import Copies
from graphfuse.codegen.elements import Elements, packed_type
from graphfuse.codegen.expressions import literal
from graphfuse.codegen.parameters import pointers
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.codegen.stores import stored
from graphfuse.codegen.sums import added
from graphfuse.ops import REDUCTIONS
from graphfuse.rows.steps import Join, Load
from graphfuse.rows.views import View


def source(plan: PhasePlan, copies: Copies) -> Iterator[str]:
    """The struct template Phase, specialized for each phase."""
    yield ""
    yield "template <int NUMBER>"
    yield "struct Phase;"
    for phase in plan.phases:
        yield "template <>"
        yield f"struct Phase<{phase}> {{"
        yield from _reads(plan, copies, "Rows", plan.reads(phase, True))
        yield from _reads(plan, copies, "Columns", plan.reads(phase, False))
        yield from _waits(plan, copies, phase) if plan.stages else ()
        yield from Elements(plan, phase).exchange() if plan.own_pairs else ()
        yield from _run(Elements(plan, phase))
        yield "};"


def _reads(plan: PhasePlan, copies: Copies, kind: str, inputs: Sequence[int]) -> Iterator[str]:
    """The struct of a phase's reads, and the function that reads them. kind: Rows, or Columns."""
    yield f"  struct {kind} {{"
    yield from (f"    {packed_type(plan, Load(i))} r{i};" for i in inputs)
    yield "  };"
    sizes = {i: plan.nbytes_of(plan.program.inputs[i]) for i in inputs}
    if kind == "Rows":
        yield "  GF_DEVICE static Rows any_rows() {"
        yield "    return {" + ", ".join(f"gf::any_bytes<{size}>()" for size in sizes.values()) + "};"
        yield "  }"
    yield f"  GF_DEVICE static {kind} read_{kind.lower()}(const Row& row, Index at) {{"
    loads, names = [], {pointer.name: pointer.place_name for pointer in pointers(plan)}
    for i, size in sizes.items():
        view = plan.program.inputs[i]
        copied, width = copies.named(f"i{i}"), plan.width(view)
        # Cached reads only if nothing writes the input meanwhile: the output may overwrite a row.
        how = "ROW_READS" if kind == "Rows" and not _repeats(view) else "COLUMN_READS"
        address = view.place.address(names[f"i{i}"], f"row.i{i}")
        address = f"gf::offset({address}, {pieces.step(plan, f'i{i}', size, view.unit)})"
        load = copied.piece_read if copied else _load(plan, i, names[f"i{i}"], f"{width}, {how}", address)
        # The second piece of a thread has the same pairs as the first, and gets the reads of that.
        loads.append(f"at == 0 ? ({load}) : gf::any_bytes<{size}>()" if plan.has_both(i) else load)
    yield "    return {" + ",\n            ".join(loads) + "};"
    yield "  }"


def _waits(plan: PhasePlan, copies: Copies, phase: int) -> Iterator[str]:
    """The constant WAITS: true if some but not all inputs of a row are copied, so that it waits for global memory."""
    copied = any(c.pieces for c in copies.inputs)
    waits = copied and any(copies.named(f"i{i}") is None for i in plan.reads(phase, True))
    yield f"  static constexpr bool WAITS = {str(waits).lower()};"


def _repeats(view: View) -> bool:
    """True if elements are read repeatedly: those for several columns, or of a limited range of rows with a stride of
    0."""
    if view.unit.pairs is not None or view.unit.period:
        return True
    return view.place.span is not None and not all(view.row_strides)


def _load(plan: PhasePlan, i: int, name: str, how: str, address: str) -> str:
    """A read of an input that may lack the row or these columns. name: prefix of the place's parameters."""
    view = plan.program.inputs[i]
    ctype, elements = view.dtype.facts.ctype, plan.elements_of(view)
    load = f"gf::load<{plan.nbytes_of(view)}, {how}>({address})"
    if exists := view.place.exists(name):
        load = f"gf::load_if<{ctype}, {elements}, {how}>({exists}, {address}, {literal(float('nan'))})"
    if beyond := view.unit.beyond(plan.piece, plan.columns):
        load = f"{beyond} ? gf::filled<{ctype}, {elements}>({literal(view.unit.otherwise)}) : ({load})"
    return load


def _run(elements: Elements) -> Iterator[str]:
    plan, program, phase = elements.plan, elements.program, elements.phase
    row_sums, maxima = (program.reduced_after(phase, join) for join in Join)
    # Padding of a row is read as zero, and so are its products, if nothing is computed before.
    zeros = all(isinstance(o, Load) for k in row_sums for o in program.joined(k))
    yield f"  static constexpr bool ZEROS_STAY_ZERO = {str(zeros).lower()};"
    starts = ("0.0f" if program.is_of_magnitudes(k) else literal(float("-inf")) for k in maxima)
    declared = f"float (&maxima)[{max(len(maxima), 1)}]{pieces.bound(plan)}"
    yield f"  GF_DEVICE static void start({declared}) {{"
    lines = (f"maxima[{number}]{pieces.index(plan)} = {value};" for number, value in enumerate(starts))
    yield from pieces.loop(plan, lines)
    yield "  }"
    factors = f"float (&x)[{max(len(row_sums), 1)}][PIECE], float (&y)[{max(len(row_sums), 1)}][PIECE]"
    sums = ", Sums& sums" * bool(plan.stages)
    yield "  GF_DEVICE static void run(const Row& row, Index at, bool inside, const Rows& rows,"
    yield "                            const Columns& columns, Held& held, const Operands& s, const PerRow& p,"
    yield f"                            float (&largest)[AMAXES], {declared},"
    yield f"                            {factors}{sums}) {{"
    yield from elements.source()
    for number, k in enumerate(row_sums):
        first, *second = (f"{elements.array(o)}[i]" for o in program.joined(k))
        yield from pieces.each([f"x[{number}][i] = {first}, y[{number}][i] = {second[0] if second else '1.0f'};"])
    yield from added(elements)
    for number, k in enumerate(maxima):
        (o,) = program.joined(k)
        at = f"maxima[{number}]{pieces.index(plan)}"
        how = reduction_mode.AMAX if program.is_of_magnitudes(k) else reduction_mode.MAX
        values = f"{{{elements.array(o)}[i]}}" if plan.across else elements.array(o)
        folded = REDUCTIONS[how].fold.format(to=at, values=values)
        yield from pieces.loop(plan, [f"{at} = inside ? {folded} : {at};"])
    yield from stored(elements)
    yield "  }"
