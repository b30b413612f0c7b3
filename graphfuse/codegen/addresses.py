"""Prints the addresses of a thread's part of a row."""

from collections.abc import Iterator, Mapping

from graphfuse.codegen.parameters import Pointer, later, pointers
from graphfuse.codegen.phase_plan import PhasePlan


def address(plan: PhasePlan, pointer: Pointer) -> str:
    """Of the thread's first piece of a row; of the first column's where pieces lie across rows. Of a tensor that has
    some of the rows null elsewhere; of one whose rows are chosen the first of all. Arguments are `a`."""
    if pointer.store is not None and pointer.view.within is not None and not pointer.view.more:
        return f"{_has_row(plan, pointer)} ? {_place(plan, pointer)} : nullptr"
    if pointer.view.indexed is not None and pointer.store is None:
        return f"{{{_place(plan, pointer)}, a.{pointer.name}_row, a.{pointer.name}_count}}"
    *before, last = (pointer, *pointer.after)
    return " : ".join([*(f"{_has_row(plan, p)} ? {_place(plan, p)}" for p in before), _place(plan, last)])


def _numbers(plan: PhasePlan, pointer: Pointer) -> list[str]:
    """The numbers of the row along its axes, as the tensor counts them."""
    found = ["index"] if len(plan.extents) == 1 else [f"axis{axis}" for axis in range(len(plan.extents))]
    within = pointer.view.within
    if within is not None and within.first:
        found[within.axis] = f"(gf::u32({found[within.axis]}) - a.{pointer.name}_first)"
    return found


def _has_row(plan: PhasePlan, pointer: Pointer) -> str:
    """Of several tensors none before it has the row."""
    within, alone = pointer.view.within, not (pointer.part or pointer.view.more)
    number = "index" if len(plan.extents) == 1 else f"axis{within.axis}"
    found = f"gf::u32({number}) < a.{pointer.name}_end"
    return found + f" && gf::u32({number}) >= a.{pointer.name}_first" * bool(alone and within.first)


def _place(plan: PhasePlan, pointer: Pointer, whole: bool = False) -> str:
    """whole: of the row itself instead of the thread's first piece."""
    view, store = pointer.view, pointer.store
    if store and store.amax:
        return f"a.{pointer.name}"
    numbers = _numbers(plan, pointer)
    terms = [f"{numbers[k]} * a.{stride}" for k, stride in zip(pointer.axes, pointer.strides, strict=False)]
    if view.offset:
        terms.append(str(view.dtype.nbytes(view.offset)))
    if view.swizzled:
        terms.append(f"gf::ScalesInTiles::row(index, {plan.columns // store.block_size})")
    elif pointer.of_blocks:
        apart = pointer.apart("a.")
        terms.append(f"thread / {store.block_size // plan.piece}" + f" * {apart}" * (apart != "1"))
    elif view.of_pairs is not None and not view.of_pairs.pairs.interleaved:
        terms.append(f"gf::u32(thread) % {view.of_pairs.pairs.count // plan.piece}u * {plan.nbytes_of(view)}")
    elif view.columns and not plan.across and not whole:
        terms.append(f"thread * {plan.nbytes_of(view)}")
    offset = f"gf::offset(a.{pointer.name}, {' + '.join(terms) or '0'})"
    return f"gf::settled({offset})" if store else offset


def source(plan: PhasePlan, copied: Mapping[str, str]) -> Iterator[str]:
    """The struct Row, and the functions row_of, which makes one, and complete, which adds the outputs whose parameters
    are read late. copied: by pointers' names, where those lie that are copied."""
    behind = later(plan)
    first = [p for p in pointers(plan) if p not in behind and not p.part and not _is_numbers(plan, p)]
    places = [copied.get(pointer.name) or address(plan, pointer) for pointer in first]
    assigned = [f"row.{pointer.name} = {address(plan, pointer)};" for pointer in behind]
    spaced = [pointer.spaced for pointer in (*first, *behind) if pointer.spaced]
    picked = [pointer for pointer in first if not pointer.store and plan.program.picked_in(int(pointer.name[1:]))]
    yield ""
    yield "/// The addresses of one row as one of its threads sees it: of the thread's first piece."
    yield "struct Row {"
    yield from (f"  {_type(pointer)} {pointer.name};" for pointer in first)
    yield from (f"  gf::i64 {name};" for name in spaced)
    yield from (f"  const void* whole_{pointer.name};  // of the first column" for pointer in picked)
    yield "  Index thread;"
    yield "  bool exists;  // the last CTA may have fewer rows than threads for them"
    yield from (f"  void* {pointer.name} = nullptr;" for pointer in behind)
    yield from (f"  gf::i64 n{k} = 0;" for k, _ in enumerate(plan.program.indices))
    yield "};"
    stage = ", unsigned char* stage" * bool(plan.stages)
    yield f"GF_DEVICE Row row_of(const Arguments& a, gf::i64 index, Index thread{stage}) {{"
    yield from axes(plan)
    whole = (_place(plan, pointer, whole=True) for pointer in picked)
    made = [*places, *(f"a.{s}" for s in spaced), *whole, "thread", "index < a.rows"]
    yield "  return {" + ", ".join(made) + "};"
    yield "}"
    yield from _located(plan)
    yield "GF_DEVICE void complete(Row& row, const Arguments& a, gf::i64 index) {"
    yield "  const Index thread = row.thread;"
    yield "  (void)thread;"
    yield from ["  locate(row, a, index);"] * bool(plan.stages and plan.program.indices)
    yield from axes(plan) if assigned else ()
    yield from (f"  {line}" for line in assigned)
    yield from (f"  {_chosen(pointer)}" for pointer in behind if pointer.view.indexed is not None)
    yield "}"


def _type(pointer: Pointer) -> str:
    chosen = pointer.view.indexed is not None and pointer.store is None
    return f"gf::Chosen<{pointer.ctype}>" if chosen else pointer.ctype


def _is_numbers(plan: PhasePlan, pointer: Pointer) -> bool:
    return any(pointer.view is view for view in plan.program.indices)


def _located(plan: PhasePlan) -> Iterator[str]:
    """The function locate, which reads the numbers of rows that are chosen. Where these lie is worked out where they
    are read: what is read before waits for no number."""
    yield "GF_DEVICE void locate(Row& row, const Arguments& a, gf::i64 index) {"
    yield from axes(plan) if plan.program.indices else ()
    for pointer in pointers(plan):
        if _is_numbers(plan, pointer):
            read = f"gf::integer(static_cast<const {pointer.view.dtype.facts.ctype}*>({address(plan, pointer)}))"
            yield f"  row.{pointer.name} = row.exists ? {read} : -1;"
    yield "}"


def _chosen(pointer: Pointer) -> str:
    """The statement that goes from the first of all rows to the one that is chosen, null where there is none."""
    name, number = pointer.name, f"row.n{pointer.view.indexed.index}"
    partly = f" && row.{name} != nullptr" * (pointer.view.within is not None)
    there = f"gf::u64({number}) < gf::u64(a.{name}_count){partly}"
    return f"row.{name} = {there} ? gf::offset(row.{name}, {number} * a.{name}_row) : nullptr;"


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
