"""Puts regions in place of the nodes that they compute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.torch.fusion.meaning import KEYS, changes, may_write, same, told, writes
from graphfuse.torch.regions.choose import TorchRegion
from graphfuse.torch.regions.operator import region as operator_of


def replace(
    module: GraphModule, regions: Sequence[TorchRegion]
) -> tuple[list[tuple[TorchRegion, str]], dict[Node, Node]]:
    """Regions, and why they are left, "" for those that are replaced; and the nodes that have the results now, by those
    that had them."""
    graph, new, verdicts = module.graph, dict[Node, Node](), list[tuple[TorchRegion, str]]()
    for region in regions:
        verdicts.append((region, _replace(graph, region, new)))
    graph.lint()
    module.recompile()
    return verdicts, new


def _replace(graph: Graph, region: TorchRegion, new: dict[Node, Node]) -> str:
    inputs = [new.get(node, node) for node in region.inputs]
    orders = region.orders[: len(inputs)], region.orders[len(inputs) :]
    like = _in_order(told(region.inputs[0]), orders[0][0])
    for one, node, order in zip(region.program.outputs, region.outputs, orders[1], strict=True):
        if not _lies(_in_order(told(node), order), like if region.program.follows and one.extents.whole else None):
            return "its results do not lie in memory as those of an operator"
    place = _place(graph, region, inputs)
    if place is None:
        return "what it reads is made after its results are read"
    with graph.inserting_before(place):
        read = [_permuted(graph, node, order) for node, order in zip(inputs, orders[0], strict=True)]
        made = graph.call_function(operator_of, (read, region.program.text))
        results = [graph.call_function(operator.getitem, (made, n)) for n in range(len(region.outputs))]
        for node, result, order in zip(region.outputs, results, orders[1], strict=True):
            result.meta |= {key: _in_order(node.meta[key], order) for key in KEYS if key in node.meta}
        for key in KEYS:
            if key in results[0].meta:
                made.meta[key] = [result.meta[key] for result in results]
        results = [_restored(graph, result, order) for result, order in zip(results, orders[1], strict=True)]
    for old, result in zip(region.outputs, results, strict=True):
        result.meta.update({k: v for k, v in old.meta.items() if k in (*KEYS, "stack_trace")})
        old.replace_all_uses_with(result, lambda user: user not in region.nodes)
        new[old] = result
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return ""


def _place(graph: Graph, region: TorchRegion, inputs: Sequence[Node]) -> Node | None:
    """Node before which the operator fits: behind all that it reads, before all who read what it makes, and where modes
    are as they are for its nodes."""
    nodes = list(graph.nodes)
    order = {node: n for n, node in enumerate(nodes)}
    users = [order[user] for node in region.outputs for user in node.users if user not in region.nodes]
    behind = max((order[node] for node in inputs), default=-1) + 1
    place = min(*users, order[region.nodes[-1]] + 1)
    between = nodes[order[region.nodes[0]] : place]
    if behind > place or any(changes(node) or may_write(node) and not writes(node) for node in between):
        return None
    return nodes[place]


def _permuted(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    return node if [*order] == sorted(order) else _viewed(graph, torch.ops.aten.permute.default, node, [*order])


def _restored(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    """A result with its dimensions where the tensor has them."""
    if [*order] == sorted(order) or not same(told(node).shape[-1], 1):
        return _permuted(graph, node, [order.index(d) for d in range(len(order))])
    # So that the dimension of extent 1 gets the stride that torch gives it.
    without = _viewed(graph, torch.ops.aten.squeeze.dim, node, -1)
    return _viewed(graph, torch.ops.aten.unsqueeze.default, without, order[-1])


def _viewed(graph: Graph, view: Callable[..., torch.Tensor], node: Node, given: object) -> Node:
    made = graph.call_function(view, (node, given))
    with torch.no_grad():
        made.meta |= {key: view(node.meta[key], given) for key in KEYS if key in node.meta}
    return made


def _in_order(t: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return t.permute(*order) if [*order] != sorted(order) else t


def _lies(made: torch.Tensor, like: torch.Tensor | None) -> bool:
    """True if a tensor lies as a new one does of its shape, or, if it is given, like another one of its shape."""
    new = made.new_empty(made.shape) if like is None else torch.empty_like(like)
    pairs = zip(made.shape, made.stride(), new.stride(), strict=True)
    return all(same(extent, 1) or same(a, b) for extent, a, b in pairs)
