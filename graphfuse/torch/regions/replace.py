"""Replacement of nodes by the regions that compute them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import KEYS, may_write, recorded_result, same, writes
from graphfuse.torch.analysis.new_nodes import copy_records, insert, permuted, record
from graphfuse.torch.regions.choose import TorchRegion
from graphfuse.torch.regions.operator import region as operator_of


def replace(module: GraphModule, regions: Sequence[TorchRegion]) -> list[tuple[TorchRegion, str]]:
    """Replaces regions. Returns each of them, and why it was not replaced; "" if it was."""
    graph, new, verdicts = module.graph, dict[Node, Node](), list[tuple[TorchRegion, str]]()
    for region in regions:
        verdicts.append((region, _replace(graph, region, new)))
    erase_unread(graph)
    graph.lint()
    module.recompile()
    return verdicts


def erase_unread(graph: Graph) -> None:
    """Erases nodes that only nodes read which are gone."""
    for node in reversed(graph.nodes):
        if not node.users and inductor.is_fused(node) and not writes(node):
            graph.erase_node(node)


def _replace(graph: Graph, region: TorchRegion, new: dict[Node, Node]) -> str:
    inputs = [new.get(node, node) for node in region.inputs]
    views = [Arrangement(*one) for one in zip(region.tensors, region.orders, strict=True)]
    read, made = views[: len(inputs)], views[len(inputs) :]
    for n, view in enumerate(made):
        follows = region.program.follows and region.program.outputs[n].extents.whole
        if not _has_strides_of(view.of(view.tensor), read[0].made if follows else None):
            return "its results have other strides than an operator's"
    place, is_fit = fits(graph, region, inputs)
    if not is_fit:
        return "what it reads is made after its results are read"
    asked = ((node, view, view.tensor) for node, view in zip(inputs, read, strict=True))
    back = ((node, view, recorded_result(node)) for node, view in zip(region.outputs, made, strict=True))
    if any(view.is_unknown(recorded_result(node), viewed) for node, view, viewed in (*asked, *back)):
        return "its rows are viewed with other dimensions, and several extents vary"
    with graph.inserting_before(place):
        given = [view.put(graph, node) for node, view in zip(inputs, read, strict=True)]
        call = graph.call_function(operator_of, (given, region.program.text))
        results = [graph.call_function(operator.getitem, (call, n)) for n in range(len(region.outputs))]
        for node, result, view in zip(region.outputs, results, made, strict=True):
            record(result, node, view.of)
        for key in KEYS:
            if key in results[0].meta:
                call.meta[key] = [result.meta[key] for result in results]
        results = [
            view.put_back(graph, node, recorded_result(old))
            for node, view, old in zip(results, made, region.outputs, strict=True)
        ]
    for old, result in zip(region.outputs, results, strict=True):
        copy_records(result, old)
        old.replace_all_uses_with(result, lambda user: user not in region.nodes)
        new[old] = result
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return ""


@dataclass(frozen=True)
class Arrangement:
    """Layout in which a program sees a tensor: viewed in groups or with several dimensions as one, if `tensor` is, and
    with its dimensions in an order."""

    tensor: torch.Tensor
    order: tuple[int, ...]

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """View of a tensor in this layout."""
        with torch.no_grad():
            t = t.view(self.tensor.shape) if self._is_viewed(t) else t
            return t.permute(*self.order) if [*self.order] != sorted(self.order) else t

    @property
    def made(self) -> torch.Tensor:
        return self.of(self.tensor)

    def is_unknown(self, t: torch.Tensor, viewed: torch.Tensor) -> bool:
        """True if a graph cannot express the view of a tensor, or the view back to `viewed`, as several extents are
        unknown."""
        return self._is_viewed(t) and _static_extents(viewed).count(-1) > 1

    def put(self, graph: Graph, node: Node) -> Node:
        """Node of the view of a node."""
        if self._is_viewed(recorded_result(node)):
            node = insert(graph, torch.ops.aten.view.default, node, _static_extents(self.tensor))
        return permuted(graph, node, self.order)

    def put_back(self, graph: Graph, node: Node, like: torch.Tensor) -> Node:
        """Node of the view back: from a node in this layout to the shape of `like`."""
        node = _in_original_order(graph, node, self.order)
        return (
            insert(graph, torch.ops.aten.view.default, node, _static_extents(like)) if self._is_viewed(like) else node
        )

    def _is_viewed(self, t: torch.Tensor) -> bool:
        return t.dim() != self.tensor.dim()


def _static_extents(t: torch.Tensor) -> list[int]:
    """Extents, -1 for those that vary."""
    return [n if isinstance(n, int) else -1 for n in t.shape]


def fits(graph: Graph, region: TorchRegion, inputs: Sequence[Node]) -> tuple[Node, bool]:
    """Node before which the operator fits, and True: after all that it reads, before all readers of its results, and
    under the same modes as its nodes. If there is none, the node that prevents it, and False."""
    users = (user for node in region.outputs for user in node.users if user not in region.nodes)
    place = min(*users, region.nodes[-1].next)
    between = (node for node in graph.nodes if region.nodes[0] <= node < place)
    in_the_way = next(filter(may_write, between), None)
    return (place, all(node < place for node in inputs)) if in_the_way is None else (in_the_way, False)


def _in_original_order(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    """Result with its dimensions in the order of the original tensor."""
    back = [order.index(d) for d in range(len(order))]
    ones = [d for d, n in enumerate(back) if same(recorded_result(node).shape[n], 1)]
    if back == sorted(back) or not ones:
        return permuted(graph, node, back)
    # Dimensions of extent 1 thus get the strides that torch gives them.
    longer = [n for n in back if n not in {back[d] for d in ones}]
    node = insert(graph, torch.ops.aten.squeeze.dims, node, [back[d] for d in ones])
    node = permuted(graph, node, [sorted(longer).index(n) for n in longer])
    for d in ones:
        node = insert(graph, torch.ops.aten.unsqueeze.default, node, d)
    return node


def _has_strides_of(made: torch.Tensor, like: torch.Tensor | None) -> bool:
    """True if a tensor has the strides of a new one of its shape; or, if `like` is given, those of a new tensor like
    that."""
    new = made.new_empty(made.shape) if like is None else torch.empty_like(like)
    pairs = zip(made.shape, made.stride(), new.stride(), strict=True)
    return all(same(extent, 1) or same(a, b) for extent, a, b in pairs)
