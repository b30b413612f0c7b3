"""Printing of a phase's stores: pieces of rows, and largest magnitudes by an atomic maximum."""

from collections.abc import Iterator

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.codegen import pieces
from graphfuse.codegen.elements import Elements
from graphfuse.codegen.parameters import Pointer
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.ops import REDUCTIONS
from graphfuse.rows.program import RowProgram, Store


def amaxes(program: RowProgram) -> list[int]:
    """Numbers of the stores of a largest magnitude."""
    return [number for number, store in enumerate(program.stores) if store.amax]


def stored(elements: Elements) -> Iterator[str]:
    """Statements for the elementwise stores of a phase."""
    for number, store in elements.program.stored_in(elements.phase):
        yield from (_amax if store.amax else _piece)(elements, number, store)


def _amax(elements: Elements, number: int, store: Store) -> Iterator[str]:
    largest = f"largest[{amaxes(elements.program).index(number)}]"
    folded = REDUCTIONS[reduction_mode.AMAX].fold.format(to=largest, values=elements.array(store.value))
    yield "    if (inside && row.exists) {"
    yield f"      {largest} = {folded};"
    yield "    }"


def headers(program: RowProgram) -> Iterator[str]:
    """Headers that a program's stores need beyond ``rows.cuh``."""
    blocks = (_made(store) for store in program.stores if store.block_size)
    yield from sorted({_BY_SCALE[made][1] for made in blocks if made in _BY_SCALE})


_BY_SCALE = {
    (data_type.FP4_E2M1, data_type.FP8_E8M0): ("gf::e2m1_by_e8m0", "power_of_two_scales.cuh"),
    (data_type.FP8_E4M3, data_type.FLOAT): ("gf::e4m3_by_float", "float_scales.cuh"),
    (data_type.FP8_E5M2, data_type.FLOAT): ("gf::e5m2_by_float", "float_scales.cuh"),
}
"""(element type, scale type) -> (C++ tag, its header), for scales that are not the element type's usual ones."""


def _made(store: Store) -> tuple[data_type, data_type]:
    """Types of elements and scales of a store that is quantized in blocks."""
    if store.scales_of is not None:
        return store.scales_of, store.view.dtype
    return store.view.dtype, store.block_scale.dtype


def _element(store: Store) -> str:
    """C++ type by which elements are quantized: their type, or a tag."""
    made = _made(store)
    return _BY_SCALE[made][0] if made in _BY_SCALE else made[0].facts.ctype


def _scales(pointer: Pointer) -> str:
    if pointer.view.swizzled:
        return f"gf::ScalesInTiles{{row.{pointer.name}}}"
    return f"gf::ScalesInRow{{row.{pointer.name}, {pointer.scale_stride('row.')}}}"


def _piece(elements: Elements, number: int, store: Store) -> Iterator[str]:
    scales = _scales(Pointer(f"b{number}", store.block_scale, store)) if store.block_scale else ""
    plan, ctype, array = elements.plan, store.view.dtype.facts.ctype, elements.array(store.value)
    width, exists = plan.width(store.view), "row.exists" + f" && row.o{number} != nullptr" * store.view.place.partial
    if store.scales_of is not None:
        yield (
            f"    gf::store_scales<{_element(store)}, {store.block_size}, ROW_WRITES>("
            f"{_scales(Pointer(f'o{number}', store.view, store))}, row.thread, at, {array}, inside && {exists});"
        )
    elif part := store.view.unit.part:
        stride = Pointer(f"o{number}", store.view, store).scale_stride("row.")
        yield (
            f"    gf::store_part<{ctype}, {part // plan.piece}, ROW_WRITES>(row.o{number}, {stride}, row.thread, at, "
            f"{array}[0], inside && {exists});"
        )
    elif store.block_size:
        yield (
            f"    gf::store_blocks<{_element(store)}, {store.block_size}, {width}, ROW_WRITES>(row.o{number}, "
            f"{scales}, row.thread, at, {array}, inside && {exists});"
        )
    else:
        packed = plan.dtype(store.value) is store.view.dtype
        piece = elements.pack(store.value) if packed else f"gf::pack<{ctype}>({array})"
        place = f"row.o{number}, at"
        if plan.across:
            place = f"gf::offset(row.o{number}, {pieces.step(plan, f'o{number}', 0)}), 0"
        yield f"    gf::store_piece<{width}, ROW_WRITES>({place}, {piece}, inside && {exists});"


def raised(plan: PhasePlan) -> Iterator[str]:
    """The function raise_amaxes, which updates largest magnitudes in memory."""
    yield ""
    yield "/// What is largest of all, as far as the warp's lanes know; all of them call it together."
    yield "GF_DEVICE void raise_amaxes(const Row& row, const float (&largest)[AMAXES]) {"
    yield from (f"  gf::raise(row.o{number}, largest[{k}]);" for k, number in enumerate(amaxes(plan.program)))
    yield "}"
