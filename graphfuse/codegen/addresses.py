"""Prints the addresses of a thread's part of a row."""

from collections.abc import Iterator, Mapping

from graphfuse.codegen.parameters import Pointer, later, pointers
from graphfuse.codegen.phase_plan import PhasePlan


def address(plan: PhasePlan, pointer: Pointer, whole: bool = False) -> str:
    """Of the thread's first piece of a row; of the first column's where pieces lie across rows. Arguments are `a`.
    whole: of an input's row itself."""
    view, store = pointer.view, pointer.store
    if store and store.amax:
        return f"a.{pointer.name}"
    axes = ["index"] if len(plan.extents) == 1 else [f"axis{axis}" for axis in range(len(plan.extents))]
    terms = [f"{axis} * a.{stride}" for axis, stride in zip(axes, pointer.strides, strict=False)]
    if view.swizzled:
        terms.append(f"gf::ScalesInTiles::row(index, {plan.columns // store.block_size})")
    elif pointer.of_blocks:
        apart = pointer.apart("a.")
        terms.append(f"thread / {store.block_size // plan.piece}" + f" * {apart}" * (apart != "1"))
    elif view.columns and not plan.across and not whole:
        terms.append(f"thread * {view.dtype.nbytes(plan.piece)}")
    offset = f"gf::offset(a.{pointer.name}, {' + '.join(terms) or '0'})"
    return f"gf::settled({offset})" if store else offset


def source(plan: PhasePlan, copied: Mapping[str, str]) -> Iterator[str]:
    """The struct Row, and the functions row_of, which makes one, and complete, which adds the outputs whose parameters
    are read late. copied: by pointers' names, where those lie that are copied."""
    behind = later(plan)
    first = [pointer for pointer in pointers(plan) if pointer not in behind]
    places = [copied.get(pointer.name) or address(plan, pointer) for pointer in first]
    assigned = [f"row.{pointer.name} = {address(plan, pointer)};" for pointer in behind]
    spaced = [pointer.spaced for pointer in (*first, *behind) if pointer.spaced]
    picked = [pointer for pointer in first if not pointer.store and plan.program.picked_in(int(pointer.name[1:]))]
    yield ""
    yield "/// The addresses of one row as one of its threads sees it: of the thread's first piece."
    yield "struct Row {"
    yield from (f"  {pointer.ctype} {pointer.name};" for pointer in first)
    yield from (f"  gf::i64 {name};" for name in spaced)
    yield from (f"  const void* whole_{pointer.name};  // of the first column" for pointer in picked)
    yield "  Index thread;"
    yield "  bool exists;  // the last CTA may have fewer rows than threads for them"
    yield from (f"  void* {pointer.name} = nullptr;" for pointer in behind)
    yield "};"
    stage = ", unsigned char* stage" * bool(plan.stages)
    yield f"GF_DEVICE Row row_of(const Arguments& a, gf::i64 index, Index thread{stage}) {{"
    yield from axes(plan)
    whole = (address(plan, pointer, whole=True) for pointer in picked)
    made = [*places, *(f"a.{s}" for s in spaced), *whole, "thread", "index < a.rows"]
    yield "  return {" + ", ".join(made) + "};"
    yield "}"
    yield "GF_DEVICE void complete(Row& row, const Arguments& a, gf::i64 index) {"
    yield "  const Index thread = row.thread;"
    yield "  (void)thread;"
    yield from axes(plan) if assigned else ()
    yield from (f"  {line}" for line in assigned)
    yield "}"


def axes(plan: PhasePlan) -> Iterator[str]:
    """The numbers of row `index` along several axes."""
    if len(plan.extents) == 1:
        return
    rest = "gf::u32(index)"
    for axis in range(len(plan.extents) - 1, 0, -1):
        yield f"  const gf::u32 above{axis} = gf::divide({rest}, a.multiplier{axis}, a.shift{axis});"
        yield f"  const gf::u32 axis{axis} = {rest} - above{axis} * a.extent{axis};"
        rest = f"above{axis}"
    yield f"  const gf::u32 axis0 = {rest};"
    yield "  (void)axis0;"
