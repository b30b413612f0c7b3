"""Checks of devices, views, stores and scalars for the row engine.

Each function yields the reasons against, each with the tensor and the limit, and nothing if there is none. Only the
first reason is reported, so a check may rely on the checks before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphfuse.base.device import Device
from graphfuse.base.dtypes import FP8, SMALL_INTEGERS, data_type
from graphfuse.base.wording import counted
from graphfuse.engines.rows.limits import MAX_DIVIDED, MOST_PAIRED, WARP
from graphfuse.ops import BLOCKS
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import Store
from graphfuse.rows.steps import MOST_COLUMNS, Reduce, Scalar
from graphfuse.rows.views import View

FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
INTEGERS = (data_type.INT32, data_type.INT64)
ROUNDED = (*FLOATS, *FP8, *SMALL_INTEGERS)
"""Data types that values may be rounded to, between steps and when they are written."""
READ = (*ROUNDED, data_type.BOOLEAN)

# Compute capabilities for which the tests compile every variant of the kernel.
COMPILED = (80, 86, 89, 90, 100, 103, 120)
_MAX_AXES = 4


def program_reasons(facts: RowFacts, device: Device) -> Iterator[str]:
    """Reasons of all schedules against a device or a program."""
    if not device.runs_kernels:
        yield f"needs a CUDA device or the emulator; got {device}"
    if device.sm < COMPILED[0]:
        yield f"needs SM{COMPILED[0]} or newer; {device} is SM{device.sm}"
    if device.sm not in COMPILED:
        accepted = ", ".join(f"SM{sm}" for sm in COMPILED)
        yield f"{device} is SM{device.sm}, for which the kernel has not been compiled; accepted: {accepted}"
    program = facts.program
    for step in program.steps:
        if step.rounded not in (None, *ROUNDED):
            yield f"a value of {step.op_name} is rounded to {step.rounded.name}; accepted: {_names(ROUNDED)}"
    for step in program.steps:
        if isinstance(step, Reduce) and not program.extent(step.input).columns:
            what = f"{facts.node}: a {step.join.name} over the row"
            yield f"{what} of what is one a row; accepted: of what varies over columns"


def place_reasons(facts: RowFacts, rotates: bool = False) -> Iterator[str]:
    """Reasons of all schedules but `by_row` against places of rows, pairs of columns and parts.

    rotates: whether the schedule accepts pairs of columns, with cosines and sines in rows that are chosen by number."""
    program = facts.program
    if program.all_pairs and not rotates:
        yield f"{facts.node}: pairs of columns; accepted where a thread takes neighbouring columns of a row"
    for period in program.periods if not rotates else ():
        yield (
            f"{facts.node}: an input is the same for all parts of {counted(period, 'column')}; accepted where a thread "
            "takes neighbouring columns of a row"
        )
    for view in program.all_views:
        if view.place.kind and not (rotates and view.unit.pairs):
            yield f"{view.name!r}: its rows {view.place.kind}; accepted where CTAs take some rows and end"


def pair_reasons(facts: RowFacts, chunk: int, most: int = MOST_PAIRED) -> Iterator[str]:
    """Reasons against pairs of columns. chunk: number of elements of a row that a thread processes together. most:
    number of elements of a row that a thread may have."""
    for pairs in facts.program.all_pairs:
        if chunk % 2:
            yield f"{facts.node}: pairs of columns, in rows of {facts.columns}; accepted: an even number"
        least = chunk // 2 if pairs.interleaved else chunk
        if pairs.count % least:
            yield f"{facts.node}: {pairs.count} pairs of {facts.columns} columns; accepted: a multiple of {least}"
        if not pairs.interleaved and pairs.part:
            longest = WARP * most
            if pairs.part & (pairs.part - 1) or pairs.part > longest:
                what = f"{facts.node}: pairs of columns that lie apart, in parts of {counted(pairs.part, 'column')}"
                yield f"{what}; accepted: a power of two up to {longest}, as a warp has each part"
        elif not pairs.interleaved and facts.columns > WARP * most:
            yield (
                f"{facts.node}: pairs of columns that lie apart, in rows of {facts.columns}; accepted: up to "
                f"{WARP * most}, as a warp has a row"
            )


def period_reasons(facts: RowFacts, chunk: int) -> Iterator[str]:
    """Reasons against inputs that are the same for all parts of rows. chunk: as in ``pair_reasons``."""
    for period in facts.program.periods:
        if period % chunk:
            what = f"{facts.node}: an input is the same for all parts of {counted(period, 'column')}"
            yield f"{what}; accepted: of a multiple of {chunk}"


def part_reasons(facts: RowFacts, chunk: int, most: int = 1) -> Iterator[str]:
    """Reasons against parts of rows. chunk: as in ``pair_reasons``. most: number of chunks that a thread may process
    together."""
    longest = WARP * chunk * most
    for size in facts.program.parts:
        if size & (size - 1) or not chunk <= size <= longest:
            what = f"parts of {counted(size, 'column')} are reduced"
            yield f"{what}; accepted: a power of two from {chunk} to {longest}, as a warp has each part"


def tensor_reasons(facts: RowFacts, columns_apart: bool = False) -> Iterator[str]:
    """Reasons against a program's tensors or row axes. columns_apart: whether columns may have any stride."""
    if not facts.columns:
        yield f"{facts.node}: rows have no columns; accepted: one or more"
    for view in (part for whole in facts.program.inputs for part in whole.parts):
        accepted = READ if view.columns or columns_apart else READ + INTEGERS
        yield from _view_reasons(facts, "input", view, accepted, 0, columns_apart)
    for numbers in facts.program.indices:
        yield from _view_reasons(facts, "index", numbers, INTEGERS, 0)
    for store in facts.program.stores:
        for part in store.view.parts:
            yield from _store_reasons(facts, replace(store, view=part), columns_apart)
    for s in facts.program.sums:
        yield from _view_reasons(facts, "sum over rows", s.view, FLOATS, 0)
        yield from _alignment_reasons(f"sum over rows {s.view.name!r}", s.view)
    for scalar in facts.program.scalars:
        if not scalar.by_value:
            yield from _element_reasons(f"scalar {scalar.name!r} in device memory", scalar, FLOATS + INTEGERS)
    several = sum(extent > 1 for extent in facts.row_extents)
    if several > _MAX_AXES:
        yield f"{facts.node}: rows have {several} axes with strides of their own; accepted: {_MAX_AXES}"
    divided = len(facts.row_extents) > 1 or any(view.place.axes for view in facts.program.all_views)
    if divided and facts.rows >= MAX_DIVIDED:
        yield f"{facts.node}: {facts.rows} rows of several axes; accepted: fewer than {MAX_DIVIDED}"
    if facts.program.numbers_columns and facts.columns > MOST_COLUMNS:
        yield (
            f"{facts.node}: columns are numbered, of rows of {facts.columns}; accepted: up to {MOST_COLUMNS}, "
            "beyond which float32 does not have every number"
        )


def _store_reasons(facts: RowFacts, store: Store, columns_apart: bool) -> Iterator[str]:
    y, shape = store.view, facts.program.extents[store.value.index]
    if store.amax:
        if not shape.columns:
            yield f"amax {y.name!r} is of what is one a row; accepted: of values that vary over columns"
        yield from _element_reasons(f"amax {y.name!r}", y, (data_type.FLOAT,))
        return
    if not shape.rows and (shape.columns or facts.rows != 1):
        yield f"output {y.name!r} is the same for all rows"
    if not shape.columns:
        yield from _view_reasons(facts, "output", y, FLOATS + SMALL_INTEGERS, 1)
        return
    if y.unit.part:
        yield from _element_reasons(f"output {y.name!r}", y, ROUNDED)
        return
    if not store.block_size:
        least = 1 if columns_apart else facts.columns
        yield from _view_reasons(facts, "output", y, ROUNDED, least, columns_apart)
        return
    made = BLOCKS[store.block_size]
    # Block scales are written one by one, so they may have any strides.
    if store.scales_of is not None:
        yield from _element_reasons(f"block scale {y.name!r}", y, made.scales)
        return
    yield from _view_reasons(facts, "output", y, made.elements, facts.columns)
    apart = (stride for extent, stride in zip(facts.row_extents, y.row_strides, strict=True) if extent > 1)
    if y.dtype.bits < 8 and any(stride % 2 for stride in apart):
        yield f"output {y.name!r} has row strides {list(y.row_strides)}; accepted: even, as a byte holds two elements"
    if facts.columns % store.block_size:
        yield f"output {y.name!r} has {facts.columns} columns; accepted: a multiple of {store.block_size}"
    if store.block_scale is None:
        yield f"output {y.name!r} is quantized in blocks and has no tensor for their scales"
    yield from _element_reasons(f"block scale {store.block_scale.name!r}", store.block_scale, made.scales)


def _view_reasons(
    facts: RowFacts, role: str, view: View, dtypes: Sequence[data_type], least: int, columns_apart: bool = False
) -> Iterator[str]:
    """Reasons against a view. least: the smallest stride between rows, and between columns if they may have any."""
    what, columns = f"{role} {view.name!r}", facts.columns if view.columns else 1
    yield from _type_reasons(what, view, dtypes)
    if view.swizzled:
        yield f"{what} is reordered as F8_128x4; accepted for block scales alone"
    if view.column_stride != 1 and columns > 1 and not columns_apart:
        yield f"{what} has stride {view.column_stride} between columns; accepted: 1"
    if not view.columns:
        yield from _alignment_reasons(what, view)
    # Rows must not overlap. Axes are checked in the order of their strides.
    strides = view.place.reach(facts.row_extents, view.row_strides)
    if columns_apart:
        strides.append((columns, view.column_stride))
    for extent, stride in sorted(((e, s) for e, s in strides if e > 1), key=lambda pair: pair[1]):
        if stride < least:
            kind = "a stride of" if columns_apart else "row stride"
            yield f"{what} has {kind} {stride}; accepted: at least {least}"
        least = least and max(least, stride * extent)


def _element_reasons(what: str, tensor: View | Scalar, dtypes: Sequence[data_type]) -> Iterator[str]:
    """Reasons against a tensor that is read or written element by element."""
    yield from _type_reasons(what, tensor, dtypes)
    yield from _alignment_reasons(what, tensor)


def _type_reasons(what: str, tensor: View | Scalar, dtypes: Sequence[data_type]) -> Iterator[str]:
    if tensor.dtype not in dtypes:
        yield f"{what} is {tensor.dtype.name}; accepted: {_names(dtypes)}"


def _alignment_reasons(what: str, tensor: View | Scalar) -> Iterator[str]:
    needed = tensor.dtype.nbytes(1)
    if tensor.alignment % needed:
        yield f"{what} is aligned to {counted(tensor.alignment, 'byte')}; accepted: a multiple of {needed}"


def _names(dtypes: Sequence[data_type]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)
