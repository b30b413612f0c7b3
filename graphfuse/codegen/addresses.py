"""Prints where a thread finds its part of a row."""

from collections.abc import Iterator, Mapping

from graphfuse.codegen.parameters import Pointer, later, pointers
from graphfuse.codegen.phase_plan import PhasePlan


def address(plan: PhasePlan, pointer: Pointer) -> str:
    """Of the thread's first piece of a row; of the first column's where pieces lie across rows."""
    name, view, store = pointer.name, pointer.view, pointer.store
    if store and store.amax:
        return name
    axes = ["index"] if len(plan.extents) == 1 else [f"axis{axis}" for axis in range(len(plan.extents))]
    terms = [f"{axis} * {stride}" for axis, stride in zip(axes, pointer.strides, strict=False)]
    if view.swizzled:
        terms.append(f"gf::ScalesInTiles::row(index, {plan.columns // store.block_size})")
    elif pointer.of_blocks:
        apart = pointer.apart()
        terms.append(f"thread / {store.block_size // plan.piece}" + f" * {apart}" * (apart != "1"))
    elif view.columns and not plan.across:
        terms.append(f"thread * {view.dtype.nbytes(plan.piece)}")
    offset = f"gf::offset({name}, {' + '.join(terms) or '0'})"
    return f"gf::settled({offset})" if store else offset


def source(plan: PhasePlan, copied: Mapping[str, str]) -> Iterator[str]:
    """The struct Row and the macros ROW_AXES, ROW (initializes a Row from `index` and `thread`) and ROW_LATER (assigns
    the rest of it). copied: by pointers' names, where those lie that are copied."""
    behind = later(plan)
    first = [pointer for pointer in pointers(plan) if pointer not in behind]
    places = [copied.get(pointer.name) or address(plan, pointer) for pointer in first]
    assigned = [f"row.{pointer.name} = {address(plan, pointer)};" for pointer in behind]
    spaced = [pointer.spaced for pointer in (*first, *behind) if pointer.spaced]
    yield ""
    yield "/// The addresses of one row as one of its threads sees it: of the thread's first piece."
    yield "struct Row {"
    yield from (f"  {pointer.ctype} {pointer.name};" for pointer in first)
    yield from (f"  gf::i64 {name};" for name in spaced)
    yield "  Index thread;"
    yield "  bool exists;  // the last CTA may have fewer rows than threads for them"
    yield from (f"  void* {pointer.name} = nullptr;" for pointer in behind)
    yield "};"
    yield f"#define ROW_AXES {' '.join(_axes(plan))}".rstrip()
    yield "#define ROW {" + ", ".join([*places, *spaced, "thread", "index < rows"]) + "}"
    yield f"#define ROW_LATER {' '.join(assigned)}".rstrip()


def _axes(plan: PhasePlan) -> Iterator[str]:
    """The numbers of a row along several axes."""
    if len(plan.extents) == 1:
        return
    rest = "gf::u32(index)"
    for axis in range(len(plan.extents) - 1, 0, -1):
        yield f"const gf::u32 above{axis} = gf::divide({rest}, multiplier{axis}, shift{axis});"
        yield f"const gf::u32 axis{axis} = {rest} - above{axis} * extent{axis};"
        rest = f"above{axis}"
    yield f"const gf::u32 axis0 = {rest};"
