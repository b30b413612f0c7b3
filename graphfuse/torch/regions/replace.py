"""Puts regions in place of the nodes that they compute."""

from __future__ import annotations

import operator
from collections.abc import Sequence

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
    if any(not _is_packed(node) for node in region.outputs):
        return "its results are not contiguous"
    place = _place(graph, region, inputs)
    if place is None:
        return "what it reads is made after its results are read"
    with graph.inserting_before(place):
        made = graph.call_function(operator_of, (inputs, region.program.text))
        results = [graph.call_function(operator.getitem, (made, n)) for n in range(len(region.outputs))]
    for key in KEYS:
        if key in region.outputs[0].meta:
            made.meta[key] = [node.meta[key] for node in region.outputs]
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


def _is_packed(node: Node) -> bool:
    made, expected = told(node), 1
    for extent, stride in zip(reversed(made.shape), reversed(made.stride()), strict=True):
        if not same(extent, 1) and not same(stride, expected):
            return False
        expected = expected * extent
    return True
