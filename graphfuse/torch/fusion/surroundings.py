"""What stands around a site in a graph that is compiled, and forbids to replace it, or makes that dear."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.torch.fusion.site import Site
from graphfuse.torch.fusion.meaning import is_op, op, value

# Calls by which Dynamo writes context managers into a graph: what follows is computed otherwise.
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
class Regions:
    """Parts of a graph between changes of modes. number: of a node's part. transformed: nodes within a transform of
    torch.func that differentiates."""

    number: dict[Node, int]
    transformed: frozenset[Node]


def regions(graph: Graph) -> Regions:
    numbers, inside, depth, current = dict[Node, int](), set[Node](), 0, 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.endswith((_INTO, _OUT_OF)):
            current += 1
            differentiates = "grad" in name or "jvp" in name
            depth += differentiates * (1 if name.endswith(_INTO) else -1)
        current += name in _MODES
        numbers[node] = current
        if depth:
            inside.add(node)
    return Regions(numbers, frozenset(inside))


def forbids(site: Site, found: Regions) -> str:
    """Why an operator would not do what a site's nodes do; "" where it would."""
    nodes = [site.out, *_inner(site)]
    if any(node in found.transformed for node in nodes):
        return "it is differentiated by torch.func, which operators are not for"
    if len({found.number[node] for node in nodes}) > 1:
        return "the mode of gradients, autocast or torch.func changes within it"
    for node in nodes[1:]:
        if node is not site.total and any(_acts(user) for user in node.users):
            return f"{node.name} of it is changed, or has a hook"
    for t in map(value, site.tensors.values()):
        if hasattr(type(t), "__tensor_flatten__") and type(t).__name__ != "DTensor":
            return f"it computes with a {type(t).__name__}"
    return ""


def _acts(node: Node) -> bool:
    """Whether a node does something to what it is given, as nobody reads what it makes."""
    return not node.users and node.op != "output" and op(node) is None and node.target is not operator.getitem


def computes_twice(site: Site) -> str:
    """What of a site's nodes would be computed beside the operator, as it is read elsewhere; "" for nothing."""
    inner = set(_inner(site))
    for node in inner - {site.total}:
        elsewhere = {user for user in node.users if user.users or user.op == "output"} - inner - {site.out}
        if elsewhere and not is_op(node, "cast", "same", "view", "expand"):
            return node.name
    return ""


def _inner(site: Site) -> Iterator[Node]:
    """The nodes between a site's tensors and its result."""
    seen = {*site.tensors.values(), site.out}
    waiting = list(site.out.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen and node.op not in ("placeholder", "get_attr"):
            seen.add(node)
            yield node
            waiting += node.all_input_nodes
