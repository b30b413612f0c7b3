"""Reasons of the across schedule to decline a program."""

from collections.abc import Iterator

from graphfuse.base.wording import counted
from graphfuse.engines.rows.across.axes import accepts, contiguous_axis, varying
from graphfuse.engines.rows.across.split import AcrossSplit
from graphfuse.engines.rows.support import place_reasons
from graphfuse.patterns.rows import RowFacts

MOST_COLUMNS = 4096
"""Maximum number of strided columns if there are fewer rows than columns, as only one CTA processes a row."""


def own_reasons(facts: RowFacts) -> Iterator[str]:
    """Reasons against programs that other schedules accept."""
    program = facts.program
    yield from place_reasons(facts)
    if program.numbers_columns:
        yield f"{facts.node}: columns are numbered; accepted where columns are neighbours"
    if program.sums:
        yield f"{facts.node}: sums over rows; accepted: reductions of rows alone"
    if program.parts:
        yield f"{facts.node}: parts of rows are reduced; accepted where columns are neighbours"
    for store in program.stores:
        if store.block_size:
            what = f"output {store.view.name!r} is quantized in blocks"
            yield f"{what} along columns that are not contiguous; accepted: without blocks"


def layout_reasons(facts: RowFacts) -> Iterator[str]:
    """Reasons against rows that are not contiguous along any axis, and against few rows of many columns."""
    if contiguous_axis(facts) is None:
        yield _axis_reason(facts)
    if facts.columns > max(MOST_COLUMNS, facts.rows):
        yield (
            f"{facts.node}: {counted(facts.rows, 'row')} of {facts.columns} columns that are not contiguous, too few "
            f"for CTAs that reduce each alone; accepted: up to {MOST_COLUMNS} columns, or as many as rows"
        )


def _axis_reason(facts: RowFacts) -> str:
    """Why there is no row axis along which all tensors are contiguous."""
    views = list(varying(facts))
    for axis, extent in enumerate(facts.row_extents):
        neighbours = next((v for _, v in views if extent > 1 and v.row_strides[axis] == 1), None)
        for role, view in views if neighbours else ():
            if not accepts(role, view, axis):
                return (
                    f"{role} {view.name!r} has stride {view.row_strides[axis]} between rows that are neighbours in "
                    f"{neighbours.name!r}; accepted: 1"
                )
    if not views:
        return f"{facts.node}: no tensor that varies over rows and columns"
    role, view = views[0]
    return (
        f"{role} {view.name!r} has strides {list(view.row_strides)} between rows and {view.column_stride} between "
        "columns; accepted: 1 along an axis of rows"
    )


def row_reasons(split: AcrossSplit) -> Iterator[str]:
    """Reasons against inputs with one value per row, which must be contiguous along neighbouring rows, or the same."""
    if split.facts.row_extents[-1] <= 1:
        return
    for view in split.facts.program.inputs:
        if view.rows and not view.columns and not accepts("input", view, -1):
            yield f"input {view.name!r} has stride {view.row_strides[-1]} between neighbouring rows; accepted: 1"
