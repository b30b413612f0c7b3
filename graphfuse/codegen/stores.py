"""Prints how a phase writes pieces of rows, and raises the largest magnitude of all."""

from collections.abc import Iterator

from graphfuse.codegen import pieces
from graphfuse.codegen.elements import Elements
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.dtypes import data_type
from graphfuse.enums import reduction_mode
from graphfuse.ops import REDUCTIONS
from graphfuse.rows.program import RowProgram, Store, View


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


def headers(program: RowProgram) -> Iterator[str]:
    """Those that a program's stores need beyond ``rows.cuh``."""
    blocks = [store for store in program.stores if store.block_size]
    if any(_element(store) == _BY_E8M0 for store in blocks):
        yield "power_of_two_scales.cuh"
    if any(store.scales_of is not None for store in blocks):
        yield "scales_alone.cuh"


_BY_E8M0 = "gf::e2m1_by_e8m0"


def _element(store: Store) -> str:
    """What quantizes elements: their type, or where the scale's is not the usual one of it a tag for both."""
    element, scale = (store.view, store.block_scale) if store.scales_of is None else (None, store.view)
    element = element.dtype if element else store.scales_of
    by_e8m0 = (element, scale.dtype) == (data_type.FP4_E2M1, data_type.FP8_E8M0)
    return _BY_E8M0 if by_e8m0 else element.facts.ctype


def _scales(view: View, name: str) -> str:
    return f"gf::{'ScalesInTiles' if view.swizzled else 'ScalesInRow'}{{row.{name}}}"


def _piece(elements: Elements, number: int, store: Store) -> Iterator[str]:
    plan, ctype, array = elements.plan, store.view.dtype.facts.ctype, elements.array(store.value)
    width = plan.width(store.view)
    if store.scales_of is not None:
        yield (
            f"    gf::store_scales<{_element(store)}, {store.block_size}, ROW_WRITES>("
            f"{_scales(store.view, f'o{number}')}, row.thread, at, {array}, inside && row.exists);"
        )
    elif store.block_size:
        yield (
            f"    gf::store_blocks<{_element(store)}, {store.block_size}, {width}, ROW_WRITES>(row.o{number}, "
            f"{_scales(store.block_scale, f'b{number}')}, row.thread, at, {array}, inside && row.exists);"
        )
    else:
        packed = plan.dtype(store.value) is store.view.dtype
        piece = elements.pack(store.value) if packed else f"gf::pack<{ctype}>({array})"
        place = f"row.o{number}, at"
        if plan.across:
            place = f"gf::offset(row.o{number}, {pieces.step(plan, f'o{number}', 0)}), 0"
        yield f"    gf::store_piece<{width}, ROW_WRITES>({place}, {piece}, inside && row.exists);"


def raised(plan: PhasePlan) -> Iterator[str]:
    """The function raise_amaxes."""
    yield ""
    yield "/// What is largest of all, as far as the warp's lanes know; all of them call it together."
    yield "GF_DEVICE void raise_amaxes(const Row& row, const float (&largest)[AMAXES]) {"
    yield "  (void)row, (void)largest;"
    yield from (f"  gf::raise(row.o{number}, largest[{k}]);" for k, number in enumerate(amaxes(plan.program)))
    yield "}"
