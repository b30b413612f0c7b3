"""C++ text that depends on the direction of a piece: along a row, or across adjacent rows.

Along a row, a value of one per row is a number. Across rows, a piece has PIECE of them, and columns have strides.
"""

from collections.abc import Iterable, Iterator

from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.rows.pairs import COLUMNS, EachColumn


def index(plan: PhasePlan) -> str:
    """Index after the name of a value of one per row, in a loop over a piece."""
    return "[i]" if plan.across else ""


def bound(plan: PhasePlan) -> str:
    """Array bound in the declaration of a value of one per row."""
    return "[PIECE]" if plan.across else ""


def loop(plan: PhasePlan, lines: Iterable[str]) -> Iterator[str]:
    """Statements on values of one per row, for each row of a piece."""
    found = list(lines)
    if plan.across and found:
        yield from each(found)
    else:
        yield from (f"    {line}" for line in found)


def each(lines: Iterable[str], indent: str = "    ") -> Iterator[str]:
    """A loop of statements over the elements i of a piece."""
    yield "#pragma unroll"
    yield f"{indent}for (int i = 0; i < PIECE; ++i) {{"
    yield from (f"{indent}  {line}" for line in lines)
    yield f"{indent}}}"


def step(plan: PhasePlan, name: str, nbytes: int, unit: EachColumn = COLUMNS) -> str:
    """Bytes from an address in struct Row to its piece `at`. nbytes: of a piece. unit: of the tensor."""
    return f"at * row.{name}_apart" if plan.across else f"{unit.place(plan.piece)} * {nbytes}"
