"""Printing of values of one per row, or of one per tensor."""

from collections.abc import Iterator, Sequence

from graphfuse.codegen import pieces
from graphfuse.codegen.copies import Copies
from graphfuse.codegen.expressions import expression, literal, rounded
from graphfuse.codegen.parameters import Pointer
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.rows.program import RowProgram, Store
from graphfuse.rows.steps import Chain, Join, Load, Number, Operand, Pick, Reduce, Scalar


def member(program: RowProgram, o: Operand, of: str = "", index: str = "") -> str:
    """C++ of a value. of, index: text before and after the name of a value of one per row."""
    if isinstance(o, Scalar):
        return f"s.s{program.scalars.index(o)}"
    if isinstance(o, Number):
        return literal(o.value)
    return f"{of}{'q' if isinstance(o, Load) else 'v'}{o.index}{index}"


def source(plan: PhasePlan, copies: Copies) -> Iterator[str]:
    """The structs Operands and PerRow, and the function operands_of."""
    program = plan.program
    scalars = range(len(program.scalars))
    loads = [i for i, view in enumerate(program.inputs) if not view.columns]
    narrow = [k for k, shape in enumerate(program.extents) if not shape.columns]
    local = _local(program, narrow)
    yield ""
    yield "/// Operands of one element."
    yield "struct Operands {"
    yield from (f"  float s{k};" for k in scalars)
    yield "};"
    yield "GF_DEVICE Operands operands_of(const Arguments& a) {"
    yield f"  return {{{', '.join(f'gf::scalar(a.scalar{k})' for k in scalars)}}};"
    yield "}"
    for name, most, join in (("SUMS_OF_ROW", "MOST_SUMS", Join.SUM), ("MAXIMA", "MOST_MAXIMA", Join.MAX)):
        counts = [len(program.reduced_after(phase, join)) for phase in plan.phases]
        yield f"constexpr int {name}[] = {{{', '.join(map(str, counts))}}};  // behind each phase"
        yield f"constexpr int {most} = {max(counts)};"
    yield ""
    yield "/// Values of which there is one a row, known from the phase on that `begin` is numbered by."
    yield "struct PerRow {"
    bound = pieces.bound(plan)
    yield from (f"  float q{i}{bound};" for i in loads)
    yield from (f"  float v{k}{bound};" for k in narrow if k not in local)
    for phase in plan.phases:
        known = [k for k in narrow if program.known[k] == phase]
        sums, maxima = (max(len(program.reduced_after(phase - 1, join)), 1) for join in Join)
        yield f"  GF_DEVICE void begin(gf::Number<{phase}>, const Row& row, const Operands& s,"
        yield f"                       const float (&sums)[{sums}]{bound}, const float (&maxima)[{maxima}]{bound}) {{"
        for i in loads if phase == 0 else ():
            yield from _read(plan, copies, i)
        lines = []
        for k in known:
            declared = f"const float v{k}" if k in local else f"v{k}{pieces.index(plan)}"
            lines.append(f"{declared} = {rounded(program.steps[k], _value(plan, k, local))};")
        yield from pieces.loop(plan, lines)
        yield "  }"
        yield f"  GF_DEVICE void store(gf::Number<{phase}>, const Row& row) const {{"
        for number, store in enumerate(program.stores):
            if store.value.index in known and not store.amax:
                where = f"if (row.o{number} != nullptr) " * store.view.place.partial
                yield f"    {where}{_stored(plan, number, store)};"
        yield "  }"
    yield "};"


def _local(program: RowProgram, narrow: Sequence[int]) -> frozenset[int]:
    """Values of one per row that only values of one per row of the same phase read."""
    kept = {store.value.index for store in program.stores}
    for k, step in enumerate(program.steps):
        for o in (o for _, o in step.operands if isinstance(o, Chain)):
            if k not in narrow or program.known[o.index] != program.known[k]:
                kept.add(o.index)
    return frozenset(narrow) - kept


def _read(plan: PhasePlan, copies: Copies, i: int) -> Iterator[str]:
    """Statements that read an input of one per row, for all rows of a piece that lies across rows."""
    view = plan.program.inputs[i]
    ctype, copied = view.dtype.facts.ctype, copies.named(f"i{i}")
    if plan.across:
        how, size, width = plan.unpack(view), plan.nbytes_of(view), plan.width(view)
        yield f"    gf::Bytes<{size}> r{i} = {{}};"
        yield "    if (row.exists) {"
        yield f"      r{i} = gf::load<{size}, {width}, gf::Access::READ_ONLY>(row.i{i});"
        yield "    }"
        yield f"    gf::{how}<{ctype}>(r{i}, q{i});"
        return
    value = copied.value_read if copied else f"gf::scalar(static_cast<const {ctype}*>(row.i{i}))"
    yield f"    q{i} = row.exists ? {value} : 0.0f;"


def _stored(plan: PhasePlan, number: int, store: Store) -> str:
    ctype, value = store.view.dtype.facts.ctype, f"v{store.value.index}"
    if plan.across and (apart := Pointer(f"o{number}", store.view, store, across=True).stride_parameter):
        return f"gf::store_apart<{ctype}>(row.o{number}, row.{apart}, {value})"
    if plan.across:
        return (
            f"gf::store_piece<{plan.width(store.view)}, ROW_WRITES>(row.o{number}, 0, gf::pack<{ctype}>({value}), true)"
        )
    return f"gf::store_pack<{store.view.dtype.nbytes(1)}>(row.o{number}, {{{{gf::encode<{ctype}>({value})}}}})"


def _value(plan: PhasePlan, k: int, local: frozenset[int]) -> str:
    program = plan.program
    step = program.steps[k]
    if isinstance(step, Reduce):
        results = "sums" if step.join is Join.SUM else "maxima"
        at = program.reduced_after(program.earliest[k] - 1, step.join).index(k)
        return f"{results}[{at}]{pieces.index(plan)}"

    def operand(o: Operand) -> str:
        return member(program, o, "", "" if isinstance(o, Chain) and o.index in local else pieces.index(plan))

    if isinstance(step, Pick):  # all threads of the row read the element from memory
        number, column = step.input.index, operand(step.column)
        ctype = program.inputs[number].dtype.facts.ctype
        return f"gf::element<{ctype}>(row.whole_i{number}, {column}, COLUMNS, row.exists)"
    return expression(step, operand)
