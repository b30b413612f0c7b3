"""Queries and keys that are normalized and rotated, in an FX graph: two norms of heads, and what stands behind each.

What is recognized is x * cos + (-second half, first half) * sin, as models of transformers write it. The operator reads
cosines and sines of half a head's columns from a table of positions. So it must be in the graph that both halves have
the same ones: that they are made of ``cat((angles, angles))``. The rotation is rounded once, with the norm, as inductor
computes it, where torch rounds both products and the sum; in ``fuse``, which rounds as the model does, it has no place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphfuse.torch.fusion import generated, surroundings
from graphfuse.torch.fusion.meaning import (
    dtype,
    end_of,
    exact,
    is_changed,
    is_op,
    joined,
    number,
    operands,
    permutation,
    same,
    value,
)
from graphfuse.torch.fusion.neighbours import is_as_large
from graphfuse.torch.regions import choose
from graphfuse.torch.regions.choose import TorchRegion

NAME = "qk_norm_rope"
OPERATOR = f"differentiable_{NAME}"

WIDEST, MULTIPLE = 512, 16
"""Columns of a head that kernels take: at most, and a multiple of which."""

_ALONE = "no keys or queries are rotated with it"
_NORMS = {
    (("rmsnorm", frozenset({"in0", "in1"})),): False,
    (("rmsnorm", frozenset({"in0"})), ("mul", frozenset({"@0", "in1"}))): False,
    (("add", frozenset({"in1", 1})), ("rmsnorm", frozenset({"in0", "@0"}))): True,
}
"""RMSNorm of rows with a weight, as steps of a program and what they read: whether the weight is 1 + what is given."""


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of heads. out: the node that has its result. from_one: whether its weight is 1 + `weight`."""

    out: Node
    x: Node
    weight: Node
    eps: float
    from_one: bool

    @staticmethod
    def of(region: TorchRegion) -> "HeadNorm | None":
        """The norm that a region is. What is rounded before the weight is rounded behind the rotation instead."""
        steps = region.program.steps
        read = [{source for port, source in s.inputs.items() if port != "epsilon"} for s in steps]
        from_one = _NORMS.get(tuple((s.op, frozenset(of)) for s, of in zip(steps, read, strict=True)))
        if from_one is None or len(region.inputs) != 2 or from_one and steps[0].dtype:
            return None
        (x, weight), (out, *others) = region.inputs, region.outputs
        if others or value(weight).dim() != 1 or dtype(out) is not dtype(x):
            return None
        eps = next(s.inputs["epsilon"] for s in steps if s.op == "rmsnorm")
        return HeadNorm(out, x, weight, eps, from_one)


@dataclass(frozen=True)
class Rotation:
    """A norm of heads and its rotation.

    out: the node that has the result. order: of the dimensions of the norm's result, those of what is rotated. axis: of
    heads, in `out`. cos, sin: of each token, without a dimension for heads.
    """

    norm: HeadNorm
    out: Node
    order: tuple[int, ...]
    axis: int
    cos: Node
    sin: Node


@dataclass(frozen=True)
class Pair:
    """Rotations of queries and keys that one operator computes."""

    q: Rotation
    k: Rotation


def pairs(graph: Graph, around: surroundings.Regions) -> tuple[list[Pair], dict[Node, str]]:
    """Pairs of queries and keys, and of other norms that are rotated, by their results, why they are not."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    ends = {node: parts for node in graph.nodes if (parts := _parts(node)) is not None}
    norms = _norms(graph, [_permuted(y, value(y).dim())[0] for y, *_ in ends.values()], order)
    found: list[Pair] = []
    left, waiting = dict[Node, str](), dict[tuple[Node, Node, int], Rotation]()
    for node, parts in ends.items():
        rotation = _rotation(node, parts, norms)
        if isinstance(rotation, tuple):
            left[rotation[0]] = rotation[1]
        if not isinstance(rotation, Rotation):
            continue
        key = rotation.cos, rotation.sin, rotation.axis
        first = waiting.pop(key, None)
        if first is not None and _fit(first, rotation, order):
            why = surroundings.forbids((first.out, node), (*_read((first, rotation)),), around)
            left |= {r.norm.out: why for r in (first, rotation) if why}
            found += [] if why else [Pair(first, rotation)]
            continue
        waiting[key] = rotation
        if first is not None:
            left[first.norm.out] = _ALONE
    return found, left | {r.norm.out: _ALONE for r in waiting.values()}


def _norms(graph: Graph, ends: Sequence[Node], order: Mapping[Node, int]) -> dict[Node, TorchRegion]:
    """Norms, by their results: of those that rows end with before they are rotated, or before a view of them is."""
    nodes = {node for end in ends for node in _made_by(end, order)}
    regions = choose.find(graph, dict.fromkeys(nodes, 0)) if nodes else []
    return {region.outputs[0]: region for region in regions}


def _made_by(end: Node, order: Mapping[Node, int]) -> set[Node]:
    """The nodes that a norm may be, back from its result to one tensor as large that it reads."""
    taken, left, is_reduced = set[Node](), {end}, False
    while left:
        node = max(left, key=order.__getitem__)
        large = [other for other in left if is_as_large(other, end)]
        is_exact = generated.is_free(node) or exact(node) is not node
        if is_reduced and len(large) == 1 and node is large[0] and not is_exact:
            left.remove(node)
            continue
        left.remove(node)
        if generated.is_generated(node) or generated.is_free(node):
            taken.add(node)
            is_reduced |= generated.is_reduction(node)
            left |= {t for t in node.all_input_nodes if value(t) is not None}
    return taken


def _rotation(
    node: Node, parts: tuple[Node, object, object, set[Node]], norms: Mapping[Node, TorchRegion]
) -> Rotation | tuple[Node, str] | None:
    """The rotation that a node ends; or the norm, and why its rotation is none that the operator computes."""
    y, cos, sin, readers = parts
    rank = value(y).dim()
    source, order = _permuted(y, rank)
    if source not in norms:
        inner = is_op(source, "view")
        is_inside = bool(inner) and inner.args[0] in norms
        return (inner.args[0], "what it normalizes is no row of those that are rotated") if is_inside else None
    norm = HeadNorm.of(norms[source])
    if norm is None:
        return source, f"no operator rotates {norms[source].program.operations}"
    columns = value(y).shape[-1]
    if not isinstance(columns, int) or columns % MULTIPLE or columns > WIDEST:
        return norm.out, f"heads have {columns} columns; accepted: a multiple of {MULTIPLE}, at most {WIDEST}"
    if set(y.users) != readers or order[-1] != rank - 1 or not _is_chain(norm.out, y):
        return norm.out, "it is read by more than the rotation"
    if any(map(_is_changed_on_the_way, (cos, sin))):
        return norm.out, "its cosines or sines are changed in place"
    tables = [_table(t, y) for t in (cos, sin)]
    if None in tables or tables[0][1] != tables[1][1] or dtype(tables[0][0]) is not dtype(tables[1][0]):
        return norm.out, "it is not in the graph that both halves of a row have the same cosines and sines"
    (cos, axis), (sin, _) = tables
    if any(value(t).requires_grad for t in (cos, sin)):
        return norm.out, "its cosines or sines have gradients"
    out = node
    if dtype(out) is not dtype(norm.out):  # by cosines of a wider type
        (out,) = node.users if len(node.users) == 1 else (node,)
        if not is_op(out, "cast") or dtype(out) is not dtype(norm.out):
            return norm.out, "the rotation is not rounded to the type of the norm"
    return Rotation(norm, out, order, axis, cos, sin)


def _parts(node: Node) -> tuple[Node, object, object, set[Node]] | None:
    """y, cos, sin of y * cos + (-second half, first half) * sin, and the nodes that read y for it."""
    found = is_op(node, "add")
    for straight, crossed in operands(found) if found else ():
        one, other = is_op(straight, "mul"), is_op(crossed, "mul")
        if one is None or other is None:
            continue
        for half, sin in operands(other):
            turned = _turned(half)
            for y, cos in operands(one) if turned else ():
                if y is turned[0] and value(cos) is not None and value(sin) is not None:
                    return y, cos, sin, {straight, *turned[1]}
    return None


def _turned(node: object) -> tuple[Node, set[Node]] | None:
    """The y of (-second half, first half), and the nodes that read it."""
    parts = joined(node)
    if len(parts) != 2:
        return None
    negated = is_op(parts[0], "neg")
    ends = [negated and _half(negated.get(0, "input")), _half(parts[1])]
    if None in ends or ends[0][0] is not ends[1][0] or (ends[0][1], ends[1][1]) != (1, 0):
        return None
    return ends[0][0], {negated.get(0, "input"), parts[1]}


def _half(node: object) -> tuple[Node, int] | None:
    """Source that a node is a half of, along the last dimension, and which half."""
    found = end_of(node)
    if found is None or value(node) is None or not isinstance(value(found[0]).shape[-1], int):
        return None
    source, taken = found
    columns, start = value(source).shape[-1], taken.start or 0
    if columns % 2 or value(node).shape[-1] != columns // 2:
        return None
    if taken.step not in (None, 1) or start not in (0, columns // 2):
        return None
    return source, int(start > 0)


def _permuted(node: Node, rank: int) -> tuple[Node, tuple[int, ...]]:
    """The node whose dimensions this one has in another order, and of which each of its own is."""
    order = tuple(range(rank))
    while found := is_op(node, "permute"):
        own = permutation(found, rank) if value(found.args[0]) is not None else None
        if own is None:
            break
        order, node = tuple(own[d] for d in order), found.args[0]
    return node, order


def _is_chain(out: Node, y: Node) -> bool:
    """True if a norm's result is read as y alone."""
    while y is not out:
        source = y.args[0]
        if list(source.users) != [y]:
            return False
        y = source
    return not is_changed(out)


def _table(node: object, y: Node) -> tuple[Node, int] | None:
    """The cosines or sines of each token, which a node has with a dimension for heads, and that dimension."""
    node = exact(node)
    found, rank = is_op(node, "view"), value(y).dim()
    source = found.args[0] if found and found.args else None
    if value(source) is None or value(node).dim() != rank or value(source).dim() != rank - 1:
        return None
    axis = _inserted(value(source).shape, value(node).shape, found.args[1:] or tuple(found.named.values()))
    if axis is None or not 0 < axis < rank - 1 or not _has_pairs(source):
        return None
    *tokens, columns = value(source).shape
    *wanted, width = (n for i, n in enumerate(value(y).shape) if i != axis)
    fits = all(same(a, b) or same(a, 1) and i == 0 for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)))
    return (source, axis) if fits and same(columns, width) else None


def _inserted(old: torch.Size, new: torch.Size, given: tuple[object, ...]) -> int | None:
    """Dimension that ``unsqueeze`` put, or an index with None among full slices."""
    if len(given) != 1:
        return None
    if isinstance(given[0], int):
        return given[0] % len(new)
    index = given[0] if isinstance(given[0], tuple) else ()
    places = [i for i, part in enumerate(index) if part is None]
    is_plain = all(part is None or part == slice(None) for part in index)
    return places[0] if is_plain and len(places) == 1 else None


def _is_changed_on_the_way(node: object) -> bool:
    """True if cosines or sines, or what they are made of up to the angles, are changed in place."""
    while isinstance(node, Node):
        if is_changed(node):
            return True
        first = node.args[0] if node.args else None
        node = first[0] if isinstance(first, list | tuple) and first else first
    return False


def _has_pairs(node: object) -> bool:
    """True if the two halves of a row of cosines or sines are the same, for what the graph shows."""
    while True:
        node = exact(node)
        found = is_op(node, "cast", "same", "cos", "sin", "mul")
        if found is None:
            break
        if found.meaning == "mul":
            numbers = [number(t) is not None for t in next(operands(found))]
            if sum(numbers) != 1:
                return False
            node = next(operands(found))[numbers.index(False)]
        else:
            node = found.args[0]
    parts = joined(node)
    return len(parts) == 2 and parts[0] is parts[1]


def _fit(q: Rotation, k: Rotation, order: Mapping[Node, int]) -> bool:
    """True if an operator takes both, and all that they read is there before either is."""
    a, b = value(q.out), value(k.out)
    one, two = q.norm, k.norm
    if (one.from_one, one.eps, a.dtype, a.dim()) != (two.from_one, two.eps, b.dtype, b.dim()):
        return False
    if dtype(one.weight) is not dtype(two.weight):
        return False
    if not all(same(m, n) for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if i != q.axis):
        return False
    first = min(order[q.out], order[k.out])
    return all(order[t] < first for t in _read((q, k)))


def _read(rotations: Sequence[Rotation]) -> Iterator[Node]:
    for r in rotations:
        yield from (r.norm.x, r.norm.weight, r.cos, r.sin)
