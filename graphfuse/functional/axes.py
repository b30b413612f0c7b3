"""Which dimension of a function's first tensor each dimension of its tensors follows, found from the rules of shapes.

The rules are asked about extents that stand for themselves: whatever comes out of a rule unchanged follows the
dimension that it was.
"""

from collections.abc import Mapping, Sequence

from graphfuse.functional.tensor_parameter import Shape, TensorParameter

Axes = tuple[int | None, ...]
"""For each dimension of a tensor, in elements, the dimension of the first tensor whose extent it has; None for none."""

# Extents that nothing comes to by chance: sums and products of some are none of the others.
_ROWS, _COLUMNS = 1 << 20, 1 << 42


def axes(used: Sequence[TensorParameter], shapes: Mapping[str, Shape]) -> dict[str, Axes]:
    """Axes of every tensor that a call uses.

    used: in order. shapes: in elements, of those that are given; they fit each other. Others have the shape that they
    are allocated with.

    A tensor that is free (``TensorParameter.free``) may have extents of its own. They count as following the first
    tensor's, as the heads of keys those of queries: what is done to one along them can be done to the other. Those of a
    table (``TensorParameter.table``) follow none.
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
