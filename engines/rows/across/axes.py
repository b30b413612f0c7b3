"""Finds the row axis along which neighbouring elements lie, and makes it the last."""

from collections.abc import Iterator
from dataclasses import replace

from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.views import View


def varying(facts: RowFacts) -> Iterator[tuple[str, View]]:
    """The tensors that vary over rows and columns, each with its role."""
    yield from (("input", view) for view in facts.program.read_whole)
    yield from (("output", view) for view in facts.program.written_whole)


def side_by_side(facts: RowFacts) -> int | None:
    """The row axis along which the elements of all outputs, and of all inputs that vary along it, are neighbours. The
    number behind the last axis where rows are single: along no axis do they lie closer than columns. None where there
    is no such axis."""
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
    """True if the elements of a tensor are neighbours along an axis; of an input, also whether they are the same."""
    return view.row_strides[axis] in ((0, 1) if role == "input" else (1,))


def turned(facts: RowFacts, axis: int) -> RowFacts:
    """The same rows with an axis last, one of extent 1 where it is the number behind the last."""
    program = facts.program
    extents = (*facts.row_extents, 1)
    order = [a for a in range(len(facts.row_extents)) if a != axis] + [axis]

    def seen(view: View) -> View:
        strides = (*view.row_strides, int(view.rows))
        return replace(view, row_strides=tuple(strides[a] for a in order))

    stores = (replace(s, view=seen(s.view), block_scale=s.block_scale and seen(s.block_scale)) for s in program.stores)
    sums = (replace(s, view=seen(s.view)) for s in program.sums)
    seen_program = replace(program, inputs=tuple(map(seen, program.inputs)), stores=tuple(stores), sums=tuple(sums))
    return replace(facts, row_extents=tuple(extents[a] for a in order), program=seen_program)
