"""Prints values of which there is one a row, or one in all."""

from collections.abc import Iterator, Sequence

from graphfuse.codegen.copies import Copies
from graphfuse.codegen.expressions import expression, literal, rounded
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.rows.program import RowProgram
from graphfuse.rows.steps import Chain, Join, Load, Number, Operand, Reduce, Scalar


def member(program: RowProgram, o: Operand, of: str = "") -> str:
    """How a value is called. of: what stands before it where it is one a row."""
    if isinstance(o, Scalar):
        return f"s.s{program.scalars.index(o)}"
    if isinstance(o, Number):
        return literal(o.value)
    return f"{of}{'q' if isinstance(o, Load) else 'v'}{o.index}"


def source(plan: PhasePlan, copies: Copies) -> Iterator[str]:
    """The structs Operands and PerRow and the macro OPERANDS."""
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
    yield f"#define OPERANDS {{{', '.join(f'gf::scalar(scalar{k})' for k in scalars)}}}"
    for name, join in (("SUMS_OF_ROW", Join.SUM), ("MAXIMA", Join.MAX)):
        counts = (str(len(program.reduced_after(phase, join))) for phase in plan.phases)
        yield f"constexpr int {name}[] = {{{', '.join(counts)}}};  // behind each phase"
    yield ""
    yield "/// Values of which there is one a row, known from the phase on that `begin` is numbered by."
    yield "struct PerRow {"
    yield from (f"  float q{i};" for i in loads)
    yield from (f"  float v{k};" for k in narrow if k not in local)
    for phase in plan.phases:
        known = [k for k in narrow if program.earliest[k] == phase]
        sums, maxima = (max(len(program.reduced_after(phase - 1, join)), 1) for join in Join)
        yield f"  GF_DEVICE void begin(gf::Number<{phase}>, const Row& row, const Operands& s,"
        yield f"                       const float (&sums)[{sums}], const float (&maxima)[{maxima}]) {{"
        yield "    (void)row, (void)s, (void)sums, (void)maxima;"
        for i in loads if phase == 0 else ():
            ctype = program.inputs[i].dtype.facts.ctype
            copied = copies.named(f"i{i}")
            value = copied.value_read if copied else f"gf::scalar(static_cast<const {ctype}*>(row.i{i}))"
            yield f"    q{i} = row.exists ? {value} : 0.0f;"
        for k in known:
            yield f"    {'const float ' * (k in local)}v{k} = {rounded(program.steps[k], _value(program, k))};"
        yield "  }"
        yield f"  GF_DEVICE void store(gf::Number<{phase}>, const Row& row) const {{"
        yield "    (void)row;"
        for number, store in enumerate(program.stores):
            if store.value.index in known and not store.amax:
                ctype, size = store.view.dtype.facts.ctype, store.view.dtype.nbytes(1)
                encoded = f"gf::encode<{ctype}>(v{store.value.index})"
                yield f"    gf::store_pack<{size}>(row.o{number}, {{{{{encoded}}}}});"
        yield "  }"
    yield "};"


def _local(program: RowProgram, narrow: Sequence[int]) -> frozenset[int]:
    """Of the values that are one a row, those that only others read that are known as early."""
    kept = {store.value.index for store in program.stores}
    for k, step in enumerate(program.steps):
        for o in (o for _, o in step.operands if isinstance(o, Chain)):
            if k not in narrow or program.earliest[o.index] != program.earliest[k]:
                kept.add(o.index)
    return frozenset(narrow) - kept


def _value(program: RowProgram, k: int) -> str:
    step = program.steps[k]
    if isinstance(step, Reduce):
        results = "sums" if step.join is Join.SUM else "maxima"
        return f"{results}[{program.reduced_after(program.earliest[k] - 1, step.join).index(k)}]"
    return expression(step, lambda o: member(program, o))
