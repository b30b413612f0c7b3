"""Finds the row axis along which elements are contiguous, and makes it the last row axis."""

from collections.abc import Iterator
from dataclasses import replace

from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.views import View


def varying(facts: RowFacts) -> Iterator[tuple[str, View]]:
    """The tensors that vary over rows and columns, each with its role."""
    yield from (("input", view) for view in facts.program.read_whole)
    yield from (("output", view) for view in facts.program.written_whole)


def contiguous_axis(facts: RowFacts) -> int | None:
    """The row axis along which all outputs, and all inputs that vary along it, are contiguous; None if there is none.

    It is the number of row axes if rows are single: columns are strided, and rows along all axes are farther apart."""
    views = list(varying(facts))
    several = [axis for axis, extent in enumerate(facts.row_extents) if extent > 1]
    for axis in several:
        if all(accepts(role, view, axis) for role, view in views) and any(view.row_strides[axis] for _, view in views):
            return axis
    if not views or facts.columns == 1:
        return None
    single = (
        view.column_stride > 1 and all(view.row_strides[a] > view.column_stride for a in several) for _, view in views
    )
    return len(facts.row_extents) if all(single) else None


def accepts(role: str, view: View, axis: int) -> bool:
    """True if a tensor's elements are contiguous along an axis, or for an input, if they are the same along it."""
    return view.row_strides[axis] in ((0, 1) if role == "input" else (1,))


def with_axis_last(facts: RowFacts, axis: int) -> RowFacts:
    """The same rows with `axis` as the last row axis. If it is the number of row axes, an axis of extent 1 is added."""
    program = facts.program
    extents = (*facts.row_extents, 1)
    order = [a for a in range(len(facts.row_extents)) if a != axis] + [axis]

    def last(view: View) -> View:
        strides = (*view.row_strides, int(view.rows))
        return replace(view, row_strides=tuple(strides[a] for a in order))

    stores = (replace(s, view=last(s.view), block_scale=s.block_scale and last(s.block_scale)) for s in program.stores)
    sums = (replace(s, view=last(s.view)) for s in program.sums)
    made = replace(program, inputs=tuple(map(last, program.inputs)), stores=tuple(stores), sums=tuple(sums))
    return replace(facts, row_extents=tuple(extents[a] for a in order), program=made)
