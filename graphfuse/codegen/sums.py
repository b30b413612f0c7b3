"""Printing of column reductions: a thread's partial sums, their accumulation in a phase, and their stores."""

from collections.abc import Iterator

from graphfuse.codegen import pieces
from graphfuse.codegen.elements import Elements
from graphfuse.codegen.phase_plan import PhasePlan


def source(plan: PhasePlan) -> Iterator[str]:
    """The structs Sums and Totals, and the functions totals_of and store_total."""
    sums = plan.program.sums
    yield ""
    yield f"constexpr int SUMS = {len(sums)};"
    added = [len(list(plan.program.summed_in(phase))) for phase in plan.phases]
    yield f"constexpr int SUMS_ADDED[] = {{{', '.join(map(str, added))}}};  // by phase"
    first = next((phase for phase in plan.phases if added[phase]), len(added))
    yield f"constexpr int FIRST_ADDING = {first};  // phase"
    yield "/// What a thread adds up over rows, for one piece."
    yield "struct Sums {"
    yield "  float of[SUMS + (SUMS == 0)][PIECE];"
    yield "};"
    yield "/// Where sums over all rows go. partials: those of each CTA, or cluster."
    yield "struct Totals {"
    yield "  float* partials;"
    yield from (f"  void* t{k};" for k in range(len(sums)))
    yield "};"
    partials = "static_cast<float*>(a.scratch)" if sums else "nullptr"
    yield "GF_DEVICE Totals totals_of(const Arguments& a) {"
    yield "  return {" + ", ".join([partials, *(f"a.t{k}" for k in range(len(sums)))]) + "};"
    yield "}"
    yield "GF_DEVICE void store_total(const Totals& totals, int sum, gf::i64 column, float value) {"
    for k, s in enumerate(sums):
        ctype, size = s.view.dtype.facts.ctype, s.view.dtype.nbytes(1)
        yield f"  if (sum == {k}) {{"
        to = f"gf::offset(totals.t{k}, column * {size})"
        yield f"    gf::store_pack<{size}>({to}, {{{{gf::encode<{ctype}>(value)}}}});"
        yield "  }"
    yield "}"


def added(elements: Elements) -> Iterator[str]:
    """Statements that add values of a phase to the sums over rows."""
    for number, s in elements.program.summed_in(elements.phase):
        at = f"sums.of[{number}][i]"
        factors = [f"{elements.array(o)}[i]" for o in s.factors]
        value = f"gf::fma({', '.join(factors)}, {at})" if len(factors) > 1 else f"{at} + {factors[0]}"
        yield "    if (inside && row.exists) {"
        yield from pieces.each([f"{at} = {value};"], "      ")
        yield "    }"
