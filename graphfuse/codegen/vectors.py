"""Prints accesses to pieces that lie anywhere, or of which the last is partial (``unaligned.cuh``)."""

from collections.abc import Iterator

from graphfuse.codegen.phase_plan import PhasePlan, Vectors
from graphfuse.rows.program import View

HEADER = "unaligned.cuh"


def source(plan: PhasePlan) -> Iterator[str]:
    """The constants LANES_OF_ROW and RAGGED and the function elements_left."""
    yield ""
    yield "constexpr int LANES_OF_ROW = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32;  // in a warp"
    yield f"constexpr bool RAGGED = {str(plan.ragged).lower()};  // the last piece of a row is partial"
    yield "/// Elements of a row from a piece on; beyond twice a piece any such number. Where all threads of a step"
    yield "/// have as many, that is known when compiling."
    yield "GF_DEVICE int elements_left(Index thread, Index at) {"
    yield "  const Index left = COLUMNS - (thread + at) * PIECE;"
    yield "  const bool far = (at + THREADS_PER_ROW + 1) * PIECE <= COLUMNS || left > 2 * PIECE;"
    yield "  return far ? 2 * PIECE : left < 0 ? 0 : int(left);"
    yield "}"


def inner(plan: PhasePlan) -> str:
    """Whether all that an access reaches beyond the row `index` are other rows, or gaps between rows: of tensors whose
    rows lie no closer than an access is wide, all rows but the first and the last."""
    for view in plan.program.inputs:
        vectors = plan.vectors(view) if view.rows and view.columns else None
        if vectors and any(view.dtype.nbytes(stride) < vectors.read for stride in view.row_strides):
            return "false"
    return "index > 0 && index + 1 < rows"


def is_used(plan: PhasePlan) -> bool:
    """By any input or output."""
    views = (*plan.program.inputs, *(s.view for s in plan.program.stores if not s.block_size and not s.amax))
    return any(plan.vectors(view) for view in views if view.columns)


def read(plan: PhasePlan, view: View, vectors: Vectors, name: str, how: str) -> str:
    """What is read for the piece that lies `at` pieces behind the thread's first."""
    nbytes, size = view.dtype.nbytes(plan.piece), view.dtype.nbytes(1)
    return (
        f"gf::load_around<{nbytes}, {_sizes(vectors, vectors.read)}, {how}>(row.{name}, at * {nbytes}, "
        f"at == 0 && row.thread == 0, {size} * left, {'row.inner' if view.rows else 'false'})"
    )


def piece(plan: PhasePlan, view: View, vectors: Vectors, source: str, name: str) -> str:
    """The piece, out of what was read for it."""
    grain = min(vectors.grain, vectors.read)
    return f"gf::piece_of<{view.dtype.nbytes(plan.piece)}, {vectors.read}, {grain}>({source}, row.{name})"


def stored(plan: PhasePlan, view: View, vectors: Vectors, name: str, source: str) -> str:
    nbytes, size = view.dtype.nbytes(plan.piece), view.dtype.nbytes(1)
    return (
        f"gf::store_around<{_sizes(vectors, vectors.width)}, LANES_OF_ROW, ROW_WRITES>("
        f"row.{name}, at * {nbytes}, {source}, inside && row.exists ? {size} * left : 0);"
    )


def _sizes(vectors: Vectors, width: int) -> str:
    return f"{width}, {min(vectors.grain, width)}, {min(vectors.narrow, width)}"
