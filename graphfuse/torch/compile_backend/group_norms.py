"""Group norms in graphs that inductor compiles: an operator computes the moments of channels, inductor the rest.

Inductor uses a part of the GPU for the statistics of few groups, and is slow if channels are last in memory. It
computes everything after the moments in one kernel with the operations that follow.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.torch.analysis import cost, surroundings
from graphfuse.torch.analysis.meaning import arguments, called_name, is_changed, value
from graphfuse.torch.analysis.new_nodes import copy_records, insert
from graphfuse.torch.operators import channel_moments

LEAST = 1 << 22
"""Elements of the input from which the operator is faster."""
_PARAMETERS = "input num_groups weight bias eps".split()


def replace(module: GraphModule) -> Iterator[Node]:
    """Replaces group norms of a graph, for inference. Yields the nodes that were replaced."""
    graph, nested = module.graph, surroundings.graph_parts(module.graph).nested
    for node in [node for node in graph.nodes if called_name(node) == "group_norm" and node not in nested]:
        given = {"eps": 1e-5} | arguments(node, *_PARAMETERS)
        of, groups, weight, bias, eps = map(given.get, _PARAMETERS)
        if isinstance(groups, int) and isinstance(eps, float) and _fits(node, of) and not is_changed(of):
            with graph.inserting_before(node):
                made = _normalized(graph, of, groups, weight, bias, eps)
            copy_records(made, node)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            yield node


def _fits(node: Node, of: Node) -> bool:
    """True if the operator can compute the norm of a node."""
    x, made = value(of), value(node)
    if x is None or made is None or made.requires_grad or made.dtype is not x.dtype or x.dtype not in FLOATS:
        return False
    if x.device.type != cost.DEVICE or hasattr(type(x), "__tensor_flatten__"):
        return False
    extents = x.shape[2:]
    is_known = extents and all(isinstance(n, int) for n in (x.shape[1], *extents))
    return bool(is_known) and x.numel() >= LEAST and channel_moments.piece(extents) > 0


def _normalized(graph: Graph, of: Node, groups: int, weight: Node | None, bias: Node | None, eps: float) -> Node:
    """Node of the normalized tensor. weight, bias: nodes of vectors over channels, or None."""
    x = value(of)
    by_group = groups, x.shape[1] // groups
    found = insert(graph, torch.ops.graphfuse.channel_moments.default, of, eps)
    means, variances = (
        insert(graph, torch.unflatten, insert(graph, operator.getitem, found, n), 1, by_group) for n in range(2)
    )
    both = insert(graph, torch.ops.aten.var_mean.dim, means, [2, 3], False)
    spread, mean = (insert(graph, operator.getitem, both, n) for n in range(2))
    variance = insert(graph, torch.add, insert(graph, torch.ops.aten.mean.dim, variances, [2, 3]), spread)
    scale = insert(graph, torch.unsqueeze, insert(graph, torch.rsqrt, variance), -1)
    if weight is None:
        scale = insert(graph, torch.ops.aten.expand.default, scale, (-1, *by_group))
    else:
        scale = insert(graph, torch.mul, scale, insert(graph, torch.unflatten, weight, 0, by_group))
    shift = insert(graph, torch.neg, insert(graph, torch.mul, insert(graph, torch.unsqueeze, mean, -1), scale))
    if bias is not None:
        shift = insert(graph, torch.add, shift, insert(graph, torch.unflatten, bias, 0, by_group))
    scale, shift = (insert(graph, torch.flatten, t, 1) for t in (scale, shift))
    for _ in x.shape[2:]:
        scale, shift = (insert(graph, torch.unsqueeze, t, -1) for t in (scale, shift))
    made = insert(graph, torch.add, insert(graph, torch.mul, of, scale), shift)
    return insert(graph, torch.ops.aten.to.dtype, made, x.dtype)
