"""What stands around a site in a graph that is compiled, and forbids to replace it, or makes that dear."""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.torch.fusion.meaning import is_op, op, value
from graphfuse.torch.fusion.rotation import Pair
from graphfuse.torch.fusion.site import NormSite

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
    torch.func that differentiates; nested: within any transform."""

    number: dict[Node, int]
    transformed: frozenset[Node]
    nested: frozenset[Node]


def regions(graph: Graph) -> Regions:
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
    return Regions(numbers, frozenset(inside), frozenset(nested))


def forbids(site: NormSite | Pair, found: Regions) -> str:
    """Why an operator would not do what a site's nodes do; "" where it would."""
    outs, ends = _bounds(site)
    nodes, made = [*outs, *between(outs, ends)], {*outs, *([site.total] if isinstance(site, NormSite) else ())}
    if any(node in found.transformed for node in nodes):
        return "it is differentiated by torch.func, which operators are not for"
    if len({found.number[node] for node in nodes}) > 1:
        return "the mode of gradients, autocast or torch.func changes within it"
    for node in nodes:
        if node not in made and any(acts(user) for user in node.users):
            return f"{node.name} of it is changed, or has a hook"
    may_be_sharded = isinstance(site, NormSite) and site.form.kind != "unit" and site.groups == 1
    for t in map(value, ends):
        if hasattr(type(t), "__tensor_flatten__") and not (may_be_sharded and type(t).__name__ == "DTensor"):
            return f"it computes with a {type(t).__name__}"
    return ""


def acts(node: Node) -> bool:
    """True if a node does something to what it is given, as nobody reads what it makes."""
    return not node.users and node.op != "output" and op(node) is None and node.target is not operator.getitem


def computes_twice(site: NormSite) -> str:
    """Why a node of a site would be computed beside the operator; "" where none would."""
    inner = set(between(*_bounds(site)))
    for node in inner - {site.total}:
        elsewhere = {user for user in node.users if user.users or user.op == "output"} - inner - {site.out}
        if elsewhere and not is_op(node, "cast", "same", "view", "expand"):
            return f"{node.name} of it is read elsewhere, too, and would be computed twice"
    return ""


def _bounds(site: NormSite | Pair) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The results of a site, and what it is computed from."""
    if isinstance(site, NormSite):
        return (site.out,), tuple(site.tensors.values())
    both = (site.q, site.k)
    read = tuple(t for r in both for t in (*r.norm.tensors.values(), r.cos, r.sin))
    return tuple(r.out for r in both), read


def between(outs: Iterable[Node], ends: Iterable[Node]) -> Iterator[Node]:
    """The nodes between what a site is computed from and its results."""
    seen = {*ends, *outs}
    waiting = [t for out in outs for t in out.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in seen and node.op not in ("placeholder", "get_attr"):
            seen.add(node)
            yield node
            waiting += node.all_input_nodes
