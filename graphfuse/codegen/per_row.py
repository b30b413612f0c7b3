"""Prints values of which there is one a row, or one in all."""

from collections.abc import Iterator

from graphfuse.codegen.copies import Copies
from graphfuse.codegen.expressions import expression, rounded
from graphfuse.codegen.phase_plan import PHASES, PhasePlan
from graphfuse.rowwise import AMAX, INVERSE_RMS, ROW_MEAN, RowProgram
from graphfuse.steps import Load, Operand, Scalar


def member(program: RowProgram, o: Operand, of: str = "") -> str:
    """How a value is called. of: what stands before it where it is one a row."""
    if isinstance(o, Scalar):
        return f"s.s{program.scalars.index(o)}"
    return f"{of}{'q' if isinstance(o, Load) else 'v'}{o.index}"


def maxima(program: RowProgram, phase: int) -> list[int]:
    """Steps that are the largest magnitude of a row, of those behind a phase."""
    return [k for k, step in program.reduced_after(phase) if step.op_name == AMAX]


def source(plan: PhasePlan, copies: Copies) -> Iterator[str]:
    """The structs Operands and PerRow and the macro OPERANDS."""
    program = plan.program
    scalars = range(len(program.scalars))
    loads = [i for i, view in enumerate(program.inputs) if not view.columns]
    narrow = [k for k, shape in enumerate(program.extents) if not shape.columns]
    yield ""
    yield "/// Operands of one element."
    yield "struct Operands {"
    yield from (f"  float s{k};" for k in scalars)
    yield "};"
    yield f"#define OPERANDS {{{', '.join(f'gf::scalar(scalar{k})' for k in scalars)}}}"
    yield f"constexpr int MAXIMA[] = {{{', '.join(str(len(maxima(program, phase))) for phase in PHASES)}}};"
    yield ""
    yield "/// Values of which there is one a row, known from the phase on that `begin` is numbered by."
    yield "struct PerRow {"
    yield from (f"  float q{i};" for i in loads)
    yield from (f"  float v{k};" for k in narrow)
    for phase in PHASES:
        known = [k for k in narrow if program.earliest[k] == phase]
        count = max(len(maxima(program, phase - 1)), 1)
        yield f"  GF_DEVICE void begin{phase}(const Row& row, const Operands& s{', float sum' * (phase == 1)}, "
        yield f"                       const float (&maxima)[{count}]) {{"
        yield "    (void)row, (void)s, (void)maxima;"
        for i in loads if phase == 0 else ():
            ctype = program.inputs[i].dtype.facts.ctype
            copied = copies.named(f"i{i}")
            value = copied.value_read if copied else f"gf::scalar(static_cast<const {ctype}*>(row.i{i}))"
            yield f"    q{i} = row.exists ? {value} : 0.0f;"
        yield from (f"    v{k} = {rounded(program.steps[k], _value(program, k))};" for k in known)
        yield "  }"
        yield f"  GF_DEVICE void store{phase}(const Row& row) const {{"
        yield "    (void)row;"
        for number, store in enumerate(program.stores):
            if store.value.index in known and not store.amax:
                ctype, size = store.view.dtype.facts.ctype, store.view.dtype.nbytes(1)
                encoded = f"gf::encode<{ctype}>(v{store.value.index})"
                yield f"    gf::store_pack<{size}>(row.o{number}, {{{{{encoded}}}}});"
        yield "  }"
    yield "};"


def _value(program: RowProgram, k: int) -> str:
    step = program.steps[k]
    if step.op_name == INVERSE_RMS:
        epsilon = member(program, dict(step.operands)["epsilon"])
        return f"gf::rsqrt(gf::fma(sum, PER_COLUMN, {epsilon}))"
    if step.op_name == ROW_MEAN:
        return "sum * PER_COLUMN"
    if step.op_name == AMAX:
        return f"maxima[{maxima(program, program.earliest[k] - 1).index(k)}]"
    return expression(step, lambda o: member(program, o))
