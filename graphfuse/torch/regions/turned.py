"""Pairs of a row's columns that are turned by a right angle, as models write it: (-second half, first half)."""

from __future__ import annotations

from torch.fx import Node

from graphfuse.torch.fusion.meaning import end_of, is_op, joined, value


def turned(node: object) -> tuple[Node, frozenset[Node]] | None:
    """Source whose columns a node has so, and the nodes between, which nobody else reads."""
    parts = joined(node)
    negated = is_op(parts[0], "neg") if len(parts) == 2 else None
    if negated is None:
        return None
    second, first = negated.get(0, "input"), parts[1]
    ends = _half(second), _half(first)
    inner = frozenset((parts[0], second, first))
    if None in ends or ends[0][0] is not ends[1][0] or (ends[0][1], ends[1][1]) != (1, 0):
        return None
    return (ends[0][0], inner) if all(inner.union((node,)).issuperset(n.users) for n in inner) else None


def turned_within(node: Node) -> Node | None:
    """Source of a turn that a node is a part of."""
    if is_op(node, "slice", "view", "neg") is None:
        return None
    ends = (end for user in node.users for end in (user, *user.users))
    return next((found[0] for end in ends if (found := turned(end)) is not None and node in found[1]), None)


def _half(node: object) -> tuple[Node, int] | None:
    """Source that a node is a half of, along the last dimension, and which half."""
    found = end_of(node)
    if found is None or value(node) is None or not isinstance(value(found[0]).shape[-1], int):
        return None
    source, taken = found
    columns, start = value(source).shape[-1], taken.start or 0
    is_half = not columns % 2 and value(node).shape[-1] == columns // 2 and taken.step in (None, 1)
    return (source, int(start > 0)) if is_half and start in (0, columns // 2) else None
