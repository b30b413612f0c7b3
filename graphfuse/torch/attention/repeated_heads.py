"""Detection of repeated heads of keys and values in an FX graph, where each head of queries has its own copy.

Every dimension of a tensor is tracked as a list of factors, outermost first. A factor is a dimension of the repeated
tensor, or a repeat. So it does not matter which views and copies a graph repeats with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from graphfuse.torch.analysis.meaning import Meaning, arguments, called_name, is_op, permutation, value

HEADS = 1
"""Index of the dimension of heads, out of four."""


@dataclass(frozen=True)
class _Factor:
    """A factor of an extent. dim: dimension of the repeated tensor; None for a repeat."""

    extent: int
    dim: int | None = None


_Dims = list[list[_Factor]]


@dataclass(frozen=True)
class RepeatedHeads:
    """Heads that a graph repeats. source: the node whose heads are repeated. order: its dimensions as [batch, heads,
    tokens, columns]. times: how many consecutive copies of each head there are. steps: the nodes from the source to the
    repeated heads, which the last one holds."""

    source: Node
    order: tuple[int, ...]
    times: int
    steps: tuple[Node, ...]


def repeated_heads(node: Node) -> RepeatedHeads | None:
    """The source whose heads a node repeats; None if it repeats none, or if other nodes read the steps between."""
    steps: list[Node] = []
    source = node
    while (above := _moved(source)) is not None:
        if steps and set(source.users) != {steps[-1]}:
            return None
        steps.append(source)
        source = above
        shape = _shape(source)
        dims: _Dims | None = [[_Factor(n, i)] if n != 1 else [] for i, n in enumerate(shape)]
        for step in reversed(steps):
            dims = _after(step, dims) if dims is not None else None
        order, times = _heads(dims, shape) if dims is not None and len(dims) == 4 else (None, 1)
        if order is not None and times > 1:
            return RepeatedHeads(source, order, times, tuple(reversed(steps)))
    return None


def _shape(node: object) -> tuple[int, ...] | None:
    like = value(node)
    return (*like.shape,) if like is not None and all(isinstance(n, int) for n in like.shape) else None


def _moved(node: Node) -> Node | None:
    """The source of a node that only moves or repeats elements; None for other nodes."""
    found = is_op(node, "view", "expand", "permute", "same", "cast")
    source = found.args[0] if found and found.args else None
    if called_name(node) in ("repeat", "repeat_interleave"):
        source = node.args[0] if node.args else None
    if _shape(node) is None or _shape(source) is None or value(node).dtype is not value(source).dtype:
        return None
    return source if value(node).device == value(source).device else None


def _after(node: Node, dims: _Dims) -> _Dims | None:
    """The dimensions of a node, from those of its source; None if they cannot be determined."""
    name, shape, found = called_name(node), _shape(node), is_op(node, "view", "expand", "permute", "same", "cast")
    if name == "repeat":
        return _tiled(node, dims)
    if name == "repeat_interleave":
        return _interleaved(node, dims)
    if found.meaning in ("same", "cast"):
        return dims
    if found.meaning == "permute":
        order = permutation(found, len(dims))
        return None if order is None else [dims[d] for d in order]
    if found.meaning == "expand":
        new = [[] for _ in shape[len(dims) :]] + dims
        return [[_Factor(n)] if n != 1 and not own else own for n, own in zip(shape, new, strict=True)]
    return _grouped([f for own in dims for f in own], shape) if name != "getitem" or _keeps_all(found) else None


def _keeps_all(found: Meaning) -> bool:
    """True if an index selects all of each dimension, and at most inserts dimensions."""
    index = found.args[1] if isinstance(found.args[1], tuple) else (found.args[1],)
    return all(part is None or part is Ellipsis or part == slice(None) for part in index)


def _tiled(node: Node, dims: _Dims) -> _Dims | None:
    times = node.args[1:] or (node.kwargs.get("repeats"),)
    times = times[0] if len(times) == 1 and isinstance(times[0], Sequence) else times
    if not all(isinstance(n, int) and n > 0 for n in times) or len(times) < len(dims):
        return None
    dims = [[] for _ in times[len(dims) :]] + dims
    return [[_Factor(n), *own] if n != 1 else own for n, own in zip(times, dims, strict=True)]


def _interleaved(node: Node, dims: _Dims) -> _Dims | None:
    given = arguments(node, "input", "repeats", "dim")
    times, dim = given.get("repeats"), given.get("dim")
    if not isinstance(times, int) or times < 1 or not isinstance(dim, int):
        return None
    dim %= len(dims)
    return [[*own, _Factor(times)] if i == dim and times != 1 else own for i, own in enumerate(dims)]


def _grouped(factors: Sequence[_Factor], shape: Sequence[int]) -> _Dims | None:
    """Factors grouped into dimensions of these extents; None if an extent is not a product of consecutive factors."""
    left, dims = list(factors), []
    for extent in shape:
        own, size = [], 1
        while size < extent and left:
            own.append(left.pop(0))
            size *= own[-1].extent
        if size != extent:
            return None
        dims.append(own)
    return None if left else dims


def _heads(dims: _Dims, shape: Sequence[int]) -> tuple[tuple[int, ...] | None, int]:
    """The order of the source's dimensions, or None if there is none; and the number of copies of its heads."""
    times = 1
    if dims[HEADS] and dims[HEADS][-1].dim is None:
        *own, last = dims[HEADS]
        dims, times = [own if i == HEADS else d for i, d in enumerate(dims)], last.extent
    of = [d[0].dim if len(d) == 1 else None for d in dims]
    if any(d and dim is None for d, dim in zip(dims, of, strict=True)) or len(shape) != len(dims):
        return None, times
    ones = iter(i for i, n in enumerate(shape) if n == 1)
    order = tuple(next(ones, None) if dim is None else dim for dim in of)
    return (order if sorted(d for d in order if d is not None) == list(range(len(shape))) else None), times
