"""Surroundings of a node in a compiled graph that decide whether it may be replaced: modes, transforms, side
effects."""

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.torch.analysis.meaning import op

# Calls by which Dynamo writes context managers into a graph: they change how later nodes are computed.
_MODES = frozenset(
    {
        "_set_grad_enabled",
        "_enter_autocast",
        "_exit_autocast",
        "_enter_inference_mode",
        "_exit_inference_mode",
    }
)
_INTO, _OUT_OF = "_increment_nesting", "_decrement_nesting"


@dataclass(frozen=True)
class GraphParts:
    """Parts of a graph between changes of modes. number: that of a node's part. transformed: nodes within a transform
    of torch.func that differentiates. nested: nodes within any transform."""

    number: dict[Node, int]
    transformed: frozenset[Node]
    nested: frozenset[Node]


def graph_parts(graph: Graph) -> GraphParts:
    numbers, inside, nested, depth, level, current = dict[Node, int](), set[Node](), set[Node](), 0, 0, 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.endswith((_INTO, _OUT_OF)):
            current += 1
            differentiates = "grad" in name or "jvp" in name
            change = 1 if name.endswith(_INTO) else -1
            depth, level = depth + differentiates * change, level + change
        current += name in _MODES
        numbers[node] = current
        if depth:
            inside.add(node)
        if level:
            nested.add(node)
    return GraphParts(numbers, frozenset(inside), frozenset(nested))


def has_side_effect(node: Node) -> bool:
    """True if a node does something to its arguments, as nothing reads its result."""
    return not node.users and node.op != "output" and op(node) is None and node.target is not operator.getitem
