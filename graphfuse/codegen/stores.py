"""Prints how a phase writes pieces of rows, and raises the largest magnitude of all."""

from collections.abc import Iterator

from graphfuse.codegen.elements import Elements
from graphfuse.codegen.rows import Rows, access
from graphfuse.enums import reduction_mode
from graphfuse.ops import REDUCTIONS
from graphfuse.rowwise import RowProgram, Store


def amaxes(program: RowProgram) -> list[int]:
    """The stores that are the largest magnitude of all."""
    return [number for number, store in enumerate(program.stores) if store.amax]


def stored(elements: Elements) -> Iterator[str]:
    """What a phase writes of each element."""
    for number, store in elements.program.stored_in(elements.phase):
        yield from (_amax if store.amax else _piece)(elements, number, store)


def _amax(elements: Elements, number: int, store: Store) -> Iterator[str]:
    largest = f"largest[{amaxes(elements.program).index(number)}]"
    folded = REDUCTIONS[reduction_mode.AMAX].fold.format(to=largest, values=elements.array(store.value))
    yield "    if (inside && row.exists) {"
    yield f"      {largest} = {folded};"
    yield "    }"


def _piece(elements: Elements, number: int, store: Store) -> Iterator[str]:
    rows, ctype, array = elements.rows, store.view.dtype.facts.ctype, elements.array(store.value)
    width = access(store.view, rows.piece)
    if store.block_size:
        scales = "gf::ScalesInTiles" if store.block_scale.swizzled else "gf::ScalesInRow"
        yield (
            f"    gf::store_blocks<{ctype}, {store.block_size}, {width}, ROW_WRITES>(row.o{number}, "
            f"{scales}{{row.b{number}}}, row.thread, at, {array}, inside && row.exists);"
        )
    else:
        packed = rows.dtype(store.value) is store.view.dtype
        piece = elements.pack(store.value) if packed else f"gf::pack<{ctype}>({array})"
        yield f"    gf::store_piece<{width}, ROW_WRITES>(row.o{number}, at, {piece}, inside && row.exists);"


def raised(rows: Rows) -> Iterator[str]:
    """The function raise_amaxes."""
    yield ""
    yield "/// What is largest of all, as far as the warp's lanes know; all of them call it together."
    yield "GF_DEVICE void raise_amaxes(const Row& row, const float (&largest)[AMAXES]) {"
    yield "  (void)row, (void)largest;"
    yield from (f"  gf::raise(row.o{number}, largest[{k}]);" for k, number in enumerate(amaxes(rows.program)))
    yield "}"
