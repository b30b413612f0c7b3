"""Check of a row program against the rules of row programs.

Patterns make programs, including those of plug-ins. With GRAPHFUSE_VERIFY=on every program is checked before an engine
reads it.
"""

from collections.abc import Iterator
from string import Formatter

from graphfuse.base.errors import MalformedError
from graphfuse.ops import OPS
from graphfuse.rows.pairs import COLUMNS
from graphfuse.rows.program import FUSED, OF_PARTS, SWAP, ColumnSum, Extent, RowProgram, Store, exchanges
from graphfuse.rows.steps import AnyStep, Chain, Load, Operand, Pick, Reduce, Step
from graphfuse.rows.views import ROWS, View


def check_program(program: RowProgram) -> None:
    """Raises MalformedError, with every fault, if a program breaks a rule."""
    if found := list(faults(program)):
        raise MalformedError(f"row program: {'; '.join(found)}")


def faults(program: RowProgram) -> Iterator[str]:
    """Faults of a program, as text. Rules about extents are checked only if all operands exist."""
    lost = [fault for who, o, made in _reads(program) for fault in _lost(program, who, o, made)]
    yield from lost
    yield from _views(program)
    if not lost:
        for k, step in enumerate(program.steps):
            yield from (f"{_name(k, step)} {fault}" for fault in _step(program, step))
        for k, store in enumerate(program.stores):
            yield from (f"{_name(k, store)} {fault}" for fault in _store(program, store))
        for k, total in enumerate(program.sums):
            yield from (f"{_name(k, total)} {fault}" for fault in _sum(program, total))
    read = {o for _, o, _ in _reads(program)}
    unread = ((k, step) for k, step in enumerate(program.steps) if Chain(k) not in read)
    yield from (f"{_name(k, step)} is never read" for k, step in unread)
    yield from (f"store {k} is late and does not exist" for k in program.late if k not in range(len(program.stores)))


def _name(number: int, of: AnyStep | Store | ColumnSum) -> str:
    if isinstance(of, Store | ColumnSum):
        return f"{'store' if isinstance(of, Store) else 'sum'} {number} ({of.view.name!r})"
    return f"step {number} ({of.op_name})"


def _reads(program: RowProgram) -> Iterator[tuple[str, Operand, int]]:
    """(text for the reader, operand, number of values computed before the reader) of each operand."""
    for k, step in enumerate(program.steps):
        yield from ((f"{_name(k, step)}, {port}", o, k) for port, o in step.operands)
    made = len(program.steps)
    yield from ((_name(k, store), store.value, made) for k, store in enumerate(program.stores))
    yield from ((_name(k, total), o, made) for k, total in enumerate(program.sums) for o in total.factors)


def _lost(program: RowProgram, who: str, o: Operand, made: int) -> Iterator[str]:
    if isinstance(o, Chain) and o.index not in range(made):
        yield f"{who} reads value {o.index}; accepted: values made before, of which there are {made}"
    if isinstance(o, Load) and o.index not in range(len(program.inputs)):
        yield f"{who} reads input {o.index}; accepted: one of the {len(program.inputs)}"


def _views(program: RowProgram) -> Iterator[str]:
    scales = (store.block_scale for store in program.stores if store.block_scale is not None)
    views = (*program.all_views, *scales, *(s.view for s in program.sums), *program.indices)
    axes = {len(view.row_strides) for view in views}
    if len(axes) > 1:
        yield f"views have {sorted(axes)} row axes; accepted: one number"
    for view in views:
        for index in set(view.place.numbers).difference(range(len(program.indices))):
            yield f"view {view.name!r} is chosen by index {index} of {len(program.indices)}"
    for view in program.indices:
        if view.columns or view.dtype.facts.integers is None:
            yield f"index {view.name!r} is not one integer a row"


def _step(program: RowProgram, step: AnyStep) -> Iterator[str]:
    if isinstance(step, Reduce):
        if not program.extent(step.input).columns:
            yield "reduces what has no columns"
    elif isinstance(step, Pick):
        plain = isinstance(step.input, Load) and _plain(program.inputs[step.input.index])
        if not plain:
            yield "picks an element of what is not a plain input with columns"
        if program.extent(step.column).columns:
            yield "picks by a number of which there is one a column"
    else:
        yield from _pointwise(step)
        if exchanges(step) and not program.extent(step.operands[0][1]).columns:
            yield "exchanges columns of what has none"
        if exchanges(step) and step.rounded is not None:
            yield "is rounded; accepted: a step after it that is"


def _plain(view: View) -> bool:
    return (view.columns, view.unit, view.place, view.swizzled) == (True, COLUMNS, ROWS, False)


def _pointwise(step: Step) -> Iterator[str]:
    op = OPS.get(step.op_name)
    if step.op_name == SWAP:
        ports, slots = {"input"}, {"count", "interleaved", "part"}
    elif step.op_name in OF_PARTS.values():
        ports, slots = {"input"}, {"size"}
    elif step.op_name in FUSED:
        ports, slots = {name for _, name, _, _ in Formatter().parse(FUSED[step.op_name].cuda) if name}, set()
    elif op is not None and op.pointwise:
        ports, slots = {port.name for port in op.inputs}, {a.name for a in op.attributes}
    else:
        yield "is no pointwise op"
        return
    given = [port for port, _ in step.operands]
    if sorted(given) != sorted(ports):
        yield f"has operands {sorted(given)}; accepted: {sorted(ports)}"
    if unknown := {name for name, _ in step.attributes} - slots:
        yield f"has attributes {sorted(unknown)}; accepted: {sorted(slots)}"


def _store(program: RowProgram, store: Store) -> Iterator[str]:
    columns = isinstance(store.value, Chain) and program.extents[store.value.index].columns
    if not isinstance(store.value, Chain):
        yield f"writes {store.value}; accepted: a step's value"
    elif store.amax and (not columns or store.view.rows or store.view.columns):
        yield "is a largest magnitude; accepted: one element, of values with columns"
    elif store.block_size and not columns:
        yield "quantizes blocks of what has no columns"
    elif not store.amax and store.view.columns != columns:
        yield f"writes a value {_with(columns)} columns to a tensor {_with(store.view.columns)} columns"
    if bool(store.block_size) != ((store.block_scale is not None) + (store.scales_of is not None) == 1):
        yield f"has blocks of {store.block_size} elements and its scales in {store.block_scale}, {store.scales_of}"


def _with(columns: bool) -> str:
    return "with" if columns else "without"


def _sum(program: RowProgram, total: ColumnSum) -> Iterator[str]:
    if len(total.factors) not in (1, 2):
        yield f"has {len(total.factors)} factors; accepted: 1 or 2"
    for o in total.factors:
        if not isinstance(o, Chain | Load) or not program.extent(o).columns:
            yield f"adds up {o}; accepted: values and inputs with columns"
    if Extent(total.view.rows, total.view.columns) != Extent(False, True):
        yield "is written to a tensor that does not have one element a column"
