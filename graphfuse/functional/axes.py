"""Correspondence of the dimensions of a function's tensors to those of its first tensor, derived from shape rules.

The rules are evaluated with a unique mark in place of each extent. A mark that a rule returns unchanged identifies the
dimension.
"""

from collections.abc import Mapping, Sequence

from graphfuse.functional.tensor_parameter import Shape, TensorParameter

Axes = tuple[int | None, ...]
"""The dimension of the first tensor whose extent each dimension has, counted in elements; None for no such
dimension."""

# Marks that no other extent equals by chance: sums and products of some are not equal to others.
_ROWS, _COLUMNS = 1 << 20, 1 << 42


def axes(used: Sequence[TensorParameter], shapes: Mapping[str, Shape]) -> dict[str, Axes]:
    """Axes of every tensor that a call uses.

    used: in order. shapes: in elements, of the given tensors, already checked. Others get the shape that they are
    allocated with.

    A tensor that is free (``TensorParameter.free``) may have its own extents, such as another number of heads for keys.
    They count as following the first tensor's, because what is split along one can be split along the other. The
    extents of a table (``TensorParameter.table``) follow none.
    """
    rank = len(shapes[used[0].name])
    marks = (*(_ROWS + i + 1 for i in range(rank - 1)), _COLUMNS)
    actual, marked = dict(shapes), {used[0].name: marks}
    for a in used[1:]:
        if a.table:
            marked[a.name] = (0,) * len(actual.get(a.name, ()))
            continue
        if a.free:
            marked[a.name] = marks
        alternatives = [tuple(shape) for shape in a.shape(actual)]
        chosen = alternatives.index(tuple(actual[a.name])) if a.name in actual else 0
        actual[a.name] = alternatives[chosen]
        marked[a.name] = tuple(a.shape(marked)[chosen])
    return {name: tuple(marks.index(e) if e in marks else None for e in shape) for name, shape in marked.items()}
