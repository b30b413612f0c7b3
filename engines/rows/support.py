"""What engines of row programs accept: devices, views, stores and scalars, each reason naming tensor and limit.

Each function yields the reasons against, none if there is nothing against it.
"""

from collections.abc import Iterator, Sequence

from graphfuse.device import Device
from graphfuse.dtypes import data_type
from graphfuse.ops import BLOCKS, OPS
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import RowProgram, View
from graphfuse.rows.steps import MOST_COLUMNS, Reduce

FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
FP8 = (data_type.FP8_E4M3, data_type.FP8_E5M2)
INTEGERS = (data_type.INT32, data_type.INT64)

# Chips that every variant of the kernel is compiled for by the tests.
COMPILED = (80, 86, 89, 90, 100, 103, 120)
_MAX_DIVIDED = 2**31  # rows of several axes, whose numbers are found by division
_MAX_AXES = 4


def device_reasons(device: Device) -> Iterator[str]:
    if not device.runs_kernels:
        yield f"needs a CUDA device or the emulator; got {device}"
    elif device.sm < COMPILED[0]:
        yield f"needs SM{COMPILED[0]} or newer; {device} is SM{device.sm}"
    elif device.sm not in COMPILED:
        yield f"{device} is SM{device.sm}, for which the kernel has not been compiled; accepted: " + ", ".join(
            f"SM{sm}" for sm in COMPILED
        )


def program_reasons(facts: RowFacts, device: Device) -> Iterator[str]:
    """Why a device, or a program, is refused by every schedule."""
    yield from device_reasons(device)
    yield from rounding_reasons(facts.program)
    yield from reduction_reasons(facts)


def axes_reasons(facts: RowFacts) -> Iterator[str]:
    several = sum(extent > 1 for extent in facts.row_extents)
    if several > _MAX_AXES:
        yield f"{facts.node}: rows have {several} axes with strides of their own; accepted: {_MAX_AXES}"
    if len(facts.row_extents) > 1 and facts.rows >= _MAX_DIVIDED:
        yield f"{facts.node}: {facts.rows} rows of several axes; accepted: fewer than {_MAX_DIVIDED}"


def tensor_reasons(facts: RowFacts, columns_apart: bool = False) -> Iterator[str]:
    """Why a program's inputs, stores, scalars or row axes are refused. columns_apart: columns may have any stride."""
    yield from input_reasons(facts, columns_apart)
    for number in range(len(facts.program.stores)):
        yield from store_reasons(facts, number, columns_apart)
    yield from scalar_reasons(facts.program)
    yield from axes_reasons(facts)
    if facts.program.numbers_columns and facts.columns > MOST_COLUMNS:
        yield (
            f"{facts.node}: columns are numbered, of rows of {facts.columns}; accepted: up to {MOST_COLUMNS}, "
            "beyond which float32 does not have every number"
        )


def input_reasons(facts: RowFacts, columns_apart: bool = False) -> Iterator[str]:
    for view in facts.program.inputs:
        if view.columns:
            yield from view_reasons(facts, "input", view, FLOATS, facts.columns, 0, columns_apart)
        else:
            accepted = FLOATS if columns_apart else FLOATS + INTEGERS
            yield from view_reasons(facts, "input", view, accepted, 1, 0, columns_apart)


def scalar_reasons(program: RowProgram) -> Iterator[str]:
    for scalar in program.scalars:
        if scalar.by_value:
            continue
        if scalar.dtype not in FLOATS + INTEGERS:
            accepted = names(FLOATS + INTEGERS)
            yield f"scalar {scalar.name!r} in device memory is {scalar.dtype.name}; accepted: {accepted}"
        elif scalar.alignment % scalar.dtype.nbytes(1):
            yield (
                f"scalar {scalar.name!r} in device memory is aligned to {scalar.alignment} bytes; "
                f"accepted: a multiple of {scalar.dtype.nbytes(1)}"
            )


def reduction_reasons(facts: RowFacts) -> Iterator[str]:
    """Why reductions of rows are refused, whatever the kernel."""
    program = facts.program
    for step in program.steps:
        if isinstance(step, Reduce) and not program.extent(step.input).columns:
            what = f"{facts.node}: a {step.join.name} over the row"
            yield f"{what} of what is one a row; accepted: of what varies over columns"


def rounding_reasons(program: RowProgram) -> Iterator[str]:
    for step in program.steps:
        if step.rounded not in (None, *FLOATS, *FP8):
            yield f"a value of {step.op_name} is rounded to {step.rounded.name}; accepted: {names(FLOATS + FP8)}"


def store_reasons(facts: RowFacts, number: int, columns_apart: bool = False) -> Iterator[str]:
    store = facts.program.stores[number]
    y, shape = store.view, facts.program.extents[store.value.index]
    if store.amax:
        if not shape.columns:
            yield f"amax {y.name!r} is of what is one a row; accepted: of values that vary over columns"
        if y.dtype is not data_type.FLOAT:
            yield f"amax {y.name!r} is {y.dtype.name}; accepted: FLOAT"
        if y.alignment % 4:
            yield f"amax {y.name!r} is aligned to {y.alignment} bytes; accepted: a multiple of 4"
        return
    if not shape.columns:
        if not shape.rows and facts.rows != 1:
            yield f"output {y.name!r} is the same for all rows"
        yield from view_reasons(facts, "output", y, FLOATS, 1, 1)
        return
    if not shape.rows:
        yield f"output {y.name!r} is the same for all rows"
    if not store.block_size:
        least = 1 if columns_apart else facts.columns
        yield from view_reasons(facts, "output", y, FLOATS + FP8, facts.columns, least, columns_apart)
        return
    made = BLOCKS[store.block_size]
    if store.scales_of is not None:
        yield from scale_reasons(y, made.scales)
        return
    yield from view_reasons(facts, "output", y, made.elements, facts.columns, facts.columns)
    apart = (stride for extent, stride in zip(facts.row_extents, y.row_strides, strict=True) if extent > 1)
    if y.dtype.bits < 8 and any(stride % 2 for stride in apart):
        yield f"output {y.name!r} has row strides {list(y.row_strides)}; accepted: even, as a byte holds two elements"
    if facts.columns % store.block_size:
        yield f"output {y.name!r} has {facts.columns} columns; accepted: a multiple of {store.block_size}"
    if store.block_scale is None:
        yield f"output {y.name!r} is quantized in blocks and has no tensor for their scales"
        return
    yield from scale_reasons(store.block_scale, made.scales)


def scale_reasons(view: View, dtypes: Sequence[data_type]) -> Iterator[str]:
    """Block scales are written one by one: they may have any strides."""
    what = f"block scale {view.name!r}"
    if view.dtype not in dtypes:
        yield f"{what} is {view.dtype.name}; accepted: {names(dtypes)}"
    elif view.alignment % view.dtype.nbytes(1):
        yield f"{what} is aligned to {view.alignment} bytes; accepted: a multiple of {view.dtype.nbytes(1)}"


def view_reasons(
    facts: RowFacts,
    role: str,
    view: View,
    dtypes: Sequence[data_type],
    columns: int,
    least: int,
    columns_apart: bool = False,
) -> Iterator[str]:
    """columns: extent. least: the smallest stride between rows, and between columns that may lie apart."""
    what = f"{role} {view.name!r}"
    if view.dtype not in dtypes:
        yield f"{what} is {view.dtype.name}; accepted: {names(dtypes)}"
        return
    if view.swizzled:
        yield f"{what} is reordered as F8_128x4; accepted for block scales alone"
        return
    if view.column_stride != 1 and columns > 1 and not columns_apart:
        yield f"{what} has stride {view.column_stride} between columns; accepted: 1"
    if not view.columns and view.alignment % view.dtype.nbytes(1):
        yield f"{what} is aligned to {view.alignment} bytes; accepted: a multiple of {view.dtype.nbytes(1)}"
    # Rows, from the closest ones on, must not reach into each other.
    strides = [*zip(facts.row_extents, view.row_strides, strict=True)]
    if columns_apart:
        strides.append((columns, view.column_stride))
    for extent, stride in sorted(((e, s) for e, s in strides if e > 1), key=lambda pair: pair[1]):
        if stride < least:
            kind = "a stride of" if columns_apart else "row stride"
            yield f"{what} has {kind} {stride}; accepted: at least {least}"
        least = least and max(least, stride * extent)


def names(dtypes: Sequence[data_type]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def rounding_notes(program: RowProgram) -> Iterator[str]:
    rounded = sorted({step.rounded.name for step in program.steps if step.rounded is not None})
    if rounded:
        yield f"float32 throughout; values of tensors declared as {', '.join(rounded)} are rounded to that"
    else:
        yield "float32 throughout: virtual tensors are not rounded to their data types"


def op_notes(program: RowProgram) -> Iterator[str]:
    """What the op table says of the numbers of the ops there are, each note once."""
    notes = (OPS[step.op_name].note for step in program.steps if step.op_name in OPS)
    yield from dict.fromkeys(note for note in notes if note)
