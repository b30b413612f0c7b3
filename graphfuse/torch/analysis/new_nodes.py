"""New nodes of a graph, with their results recorded like those of the graph's other nodes."""

from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphfuse.torch.analysis.meaning import KEYS


def insert(graph: Graph, operation: Callable[..., object], *given: object) -> Node:
    """Node of an operation. Its result is computed from the recorded results of its arguments, and recorded."""
    node = graph.call_function(operation, given)
    found = list[Node]()
    map_arg(given, found.append)
    for key in KEYS:
        if all(key in n.meta for n in found):
            with torch.no_grad():
                node.meta[key] = operation(*map_arg(given, lambda n, key=key: n.meta[key]))
    return node


def record(node: Node, of: Node, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Records as the result of a node what `made` returns for the recorded result of another."""
    with torch.no_grad():
        node.meta |= {key: made(of.meta[key]) for key in KEYS if key in of.meta}


def copy_records(node: Node, old: Node) -> None:
    """Records for a node what is recorded for the node that it replaces."""
    node.meta |= {key: old.meta[key] for key in (*KEYS, "stack_trace", "nn_module_stack") if key in old.meta}


def permuted(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    """The node with its dimensions in an order."""
    return node if [*order] == sorted(order) else insert(graph, torch.ops.aten.permute.default, node, [*order])


def replace_nodes(graph: Graph, other: Graph) -> None:
    """Gives a graph the nodes of another graph with the same placeholders. Its own placeholders stay, as Dynamo refers
    to them."""
    (end,) = other.find_nodes(op="output")
    known = dict(zip(*(g.find_nodes(op="placeholder") for g in (other, graph)), strict=True))
    for node in reversed(graph.nodes):
        if node.op != "placeholder":
            graph.erase_node(node)
    made = graph.output(graph.graph_copy(other, known))
    made.meta = end.meta
