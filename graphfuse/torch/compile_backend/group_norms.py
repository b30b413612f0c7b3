"""Group norms in graphs that inductor compiles: the moments of channels by an operator, and the rest for inductor.

Inductor computes statistics with a part of the GPU where groups are few, and slowly where channels are last in memory.
What is computed of the moments, and of each element, it has in one kernel with what follows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.torch.fusion import cost, surroundings
from graphfuse.torch.fusion.meaning import arguments, called, is_changed, value
from graphfuse.torch.fusion.new_nodes import put, tell_as
from graphfuse.torch.operators import channel_moments

LEAST = 1 << 22
"""Elements from which it is faster."""
_PARAMETERS = "input num_groups weight bias eps".split()


@dataclass(frozen=True)
class GroupNorm:
    """A group norm of a graph. weight, bias: nodes of vectors of the channels, or None."""

    node: Node
    input: Node
    groups: int
    weight: Node | None
    bias: Node | None
    eps: float


def replace(module: GraphModule) -> Iterator[Node]:
    """Replaces group norms of a graph, for inference. Yields those that it has replaced."""
    nested = surroundings.regions(module.graph).nested
    for one in [*_group_norms(module.graph)]:
        if one.node not in nested:
            with module.graph.inserting_before(one.node):
                made = _normalized(module.graph, one)
            tell_as(made, one.node)
            one.node.replace_all_uses_with(made)
            module.graph.erase_node(one.node)
            yield one.node


def _group_norms(graph: Graph) -> Iterator[GroupNorm]:
    for node in graph.nodes:
        if called(node) != "group_norm":
            continue
        given = arguments(node, *_PARAMETERS)
        weight, bias = given.get("weight"), given.get("bias")
        one = GroupNorm(node, given["input"], given["num_groups"], weight, bias, given.get("eps", 1e-5))
        if isinstance(one.groups, int) and isinstance(one.eps, float) and _fits(one) and not is_changed(one.input):
            yield one


def _fits(one: GroupNorm) -> bool:
    x, made = value(one.input), value(one.node)
    if x is None or made is None or made.requires_grad or made.dtype is not x.dtype or x.dtype not in FLOATS:
        return False
    if x.device.type != cost.DEVICE or hasattr(type(x), "__tensor_flatten__"):
        return False
    extents = x.shape[2:]
    is_known = extents and all(isinstance(n, int) for n in (x.shape[1], *extents))
    return bool(is_known) and x.numel() >= LEAST and channel_moments.piece(extents) > 0


def _normalized(graph: Graph, one: GroupNorm) -> Node:
    x, groups = value(one.input), one.groups
    by_group = groups, x.shape[1] // groups
    found = put(graph, torch.ops.graphfuse.channel_moments.default, one.input, one.eps)
    means, variances = (
        put(graph, torch.unflatten, put(graph, operator.getitem, found, n), 1, by_group) for n in range(2)
    )
    both = put(graph, torch.ops.aten.var_mean.dim, means, [2, 3], False)
    spread, mean = (put(graph, operator.getitem, both, n) for n in range(2))
    variance = put(graph, torch.add, put(graph, torch.ops.aten.mean.dim, variances, [2, 3]), spread)
    scale = put(graph, torch.unsqueeze, put(graph, torch.rsqrt, variance), -1)
    if one.weight is None:
        scale = put(graph, torch.ops.aten.expand.default, scale, (-1, *by_group))
    else:
        scale = put(graph, torch.mul, scale, put(graph, torch.unflatten, one.weight, 0, by_group))
    shift = put(graph, torch.neg, put(graph, torch.mul, put(graph, torch.unsqueeze, mean, -1), scale))
    if one.bias is not None:
        shift = put(graph, torch.add, shift, put(graph, torch.unflatten, one.bias, 0, by_group))
    scale, shift = (put(graph, torch.flatten, t, 1) for t in (scale, shift))
    for _ in x.shape[2:]:
        scale, shift = (put(graph, torch.unsqueeze, t, -1) for t in (scale, shift))
    made = put(graph, torch.add, put(graph, torch.mul, one.input, scale), shift)
    return put(graph, torch.ops.aten.to.dtype, made, x.dtype)
