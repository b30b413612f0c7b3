"""Printing of the addresses of a thread's part of a row."""

from collections.abc import Iterator, Mapping

from graphfuse.codegen import ranks
from graphfuse.codegen.parameters import Pointer, later, pointers
from graphfuse.codegen.phase_plan import PhasePlan


def address(plan: PhasePlan, pointer: Pointer) -> str:
    """Address of the thread's first piece of a row, or of the first column's piece if pieces lie across rows.

    It is null if an output lacks the row. For an input with chosen rows it is that of the tensor's first row."""
    found, has = [], ""
    for p in (pointer, *pointer.after):
        has = p.view.place.has(p.place_name, _numbers(plan))
        found.append(f"{has} ? {_within(plan, p)}" if has else _within(plan, p))
    return " : ".join([*found, *["nullptr"] * bool(has)])


def _numbers(plan: PhasePlan) -> list[str]:
    """Numbers of the row along the program's row axes, in C++."""
    return ["index"] if len(plan.extents) == 1 else [f"axis{axis}" for axis in range(len(plan.extents))]


def _within(plan: PhasePlan, pointer: Pointer, whole: bool = False) -> str:
    """Address of a row in a tensor that has it. whole: of the row itself instead of the thread's first piece."""
    view, store = pointer.view, pointer.store
    if store and store.amax:
        return f"a.{pointer.name}"
    numbers = view.place.counted(pointer.place_name, _numbers(plan))
    product = "gf::times({}, a.{})" if plan.in_32_bits else "{} * a.{}"
    terms = [product.format(numbers[k], s) for k, s in zip(pointer.axes, pointer.strides, strict=False)]
    if view.offset:
        terms.append(str(view.dtype.nbytes(view.offset)))
    if view.swizzled:
        terms.append(f"gf::ScalesInTiles::row(index, {plan.columns // store.block_size})")
    elif pointer.of_blocks:
        stride = pointer.scale_stride("a.")
        terms.append(
            f"thread / {(view.unit.part or store.block_size) // plan.piece}" + f" * {stride}" * (stride != "1")
        )
    elif view.columns and not plan.across and not whole:
        terms.append(view.unit.offset(plan.piece, plan.nbytes_of(view)))
    found = f"a.{pointer.shared or pointer.name}"
    for term in reversed(terms):  # the thread's part first, because it is the same for all rows
        found = f"gf::offset({found}, {term})"
    return f"gf::settled({found})" if store else found


def source(plan: PhasePlan, copied: Mapping[str, str]) -> Iterator[str]:
    """The struct Row; the function row_of, which makes one; and complete, which adds outputs whose parameters are read
    late. copied: name of a pointer -> address of its copy in shared memory."""
    behind = later(plan)
    first = [p for p in pointers(plan) if p not in behind and not p.part and not _is_numbers(plan, p)]
    places = [copied.get(pointer.name) or address(plan, pointer) for pointer in first]
    assigned = [f"row.{pointer.name} = {address(plan, pointer)};" for pointer in behind]
    stride_parameters = [pointer.stride_parameter for pointer in (*first, *behind) if pointer.stride_parameter]
    picked = [pointer for pointer in first if not pointer.store and plan.program.picked_in(int(pointer.name[1:]))]
    yield ""
    yield "/// The addresses of one row as one of its threads sees it: of the thread's first piece."
    yield "struct Row {"
    yield from (f"  {pointer.ctype} {pointer.name};" for pointer in first)
    yield from (f"  gf::i64 {name};" for name in stride_parameters)
    yield from (f"  const void* whole_{pointer.name};  // of the first column" for pointer in picked)
    yield from ["  gf::i64 index;"] * plan.program.numbers_rows
    yield "  Index thread;"
    yield "  bool exists;  // the last CTA may have fewer rows than threads for them"
    yield from (f"  void* {pointer.name} = nullptr;" for pointer in behind)
    yield from (f"  gf::i64 n{k} = gf::any_number();" for k, _ in enumerate(plan.program.indices))
    yield from (f"  {ctype} {name} = {{}};" for ctype, name, _ in _found(plan))
    yield from ranks.declared(plan)
    yield "};"
    stage = ", unsigned char* stage, gf::u32 own" * bool(plan.stages)
    yield f"GF_DEVICE Row row_of(const Arguments& a, RowIndex index, Index thread{stage}) {{"
    yield from axes(plan)
    whole = (_within(plan, pointer, whole=True) for pointer in picked)
    made = [*places, *(f"a.{s}" for s in stride_parameters), *whole, *["index"] * plan.program.numbers_rows]
    made += ["thread", "index < RowIndex(a.rows)"]
    yield "  return {" + ", ".join(made) + "};"
    yield "}"
    yield from _located(plan, copied, stage)
    yield "GF_DEVICE void complete(Row& row, const Arguments& a, RowIndex index) {"
    yield "  const Index thread = row.thread;"
    yield "  (void)thread;"
    yield from axes(plan) if assigned else ()
    yield from (f"  {line}" for line in assigned)
    for pointer in behind:
        if settled := pointer.view.place.settled(pointer.place_name, f"row.{pointer.name}"):
            yield f"  row.{pointer.name} = {settled};"
    yield "}"


def _is_numbers(plan: PhasePlan, pointer: Pointer) -> bool:
    return any(pointer.view is view for view in plan.program.indices)


def _found(plan: PhasePlan) -> Iterator[tuple[str, str, str]]:
    """Type, name and value of members of Row that are set after row numbers have been read."""
    for pointer in pointers(plan):
        if not pointer.placed:
            yield from pointer.view.place.located(pointer.name)


def _located(plan: PhasePlan, copied: Mapping[str, str], stage: str) -> Iterator[str]:
    """The function locate, which reads the numbers of chosen rows. It computes their addresses itself, so that earlier
    reads do not wait for a number."""
    yield f"GF_DEVICE void locate(Row& row, const Arguments& a, RowIndex index{stage}) {{"
    yield from ranks.located(plan)
    yield from axes(plan) if plan.program.indices else ()
    for pointer in pointers(plan):
        if _is_numbers(plan, pointer):
            staged = copied.get(pointer.name)
            how, ctype = "<gf::Access::USUAL>" * bool(staged), pointer.view.dtype.facts.ctype
            read = f"gf::integer{how}(static_cast<const {ctype}*>({staged or address(plan, pointer)}))"
            yield f"  if (row.exists) {{ row.{pointer.name} = {read}; }}"
    yield from (f"  row.{name} = {value};" for _, name, value in _found(plan))
    yield "}"


def axes(plan: PhasePlan) -> Iterator[str]:
    """Statements that compute the numbers of row `index` along several axes."""
    if len(plan.extents) == 1:
        return
    rest = "gf::u32(index)"
    for axis in range(len(plan.extents) - 1, 0, -1):
        yield f"  const gf::u32 above{axis} = gf::divide({rest}, a.multiplier{axis}, a.shift{axis});"
        yield f"  const gf::u32 axis{axis} = {rest} + above{axis} * a.less{axis};  // less: minus the extent"
        yield f"  (void)axis{axis};"
        rest = f"above{axis}"
    yield f"  const gf::u32 axis0 = {rest};"
    yield "  (void)axis0;"
