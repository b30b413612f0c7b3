"""Puts operators in place of the sites of a graph."""

import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.torch.fusion import rotated, surroundings
from graphfuse.torch.fusion.meaning import KEYS, changes, op, value
from graphfuse.torch.fusion.rotation import Pair
from graphfuse.torch.fusion.site import NormSite
from graphfuse.torch.operators.declared import epsilon

_view = torch.ops.aten.view.default
_VECTORS = ("weight", "bias")
_PER_SAMPLE = ("scale", "shift")


def rewrite(module: GraphModule, sites: Sequence[NormSite], pairs: Sequence[Pair] = ()) -> list[NormSite]:
    """Replaces sites and pairs of rotations, which are of this graph, by ``graphfuse::NAME``, which autograd and AOT
    know; nodes that nobody reads any more are removed. Returns the sites as they were replaced: one whose weight is not
    made yet where its sum is needed is replaced without the sum, and as its parts if the sum is of a norm."""
    graph, new = module.graph, dict[Node, Node]()
    rotated.put(graph, pairs)
    replaced = [made for site in sites for made in _replace(graph, site, new)]
    graph.eliminate_dead_code(_has_effects)
    graph.lint()
    module.recompile()
    return replaced


def _has_effects(node: Node) -> bool:
    """True if a node may do more than compute. Those of sites do not; torch takes methods in place for some that do."""
    return node.op != "get_attr" and op(node) is None


def _replace(graph: Graph, site: NormSite, new: dict[Node, Node]) -> list[NormSite]:
    """new: what took the place of a node, by that node, which sites still name."""
    tensors = {name: new.get(t, t) for name, t in site.tensors.items()}
    place = _place(graph, site, tensors.values())
    if place is None:
        parts = site.parts if site.inner is not None else (site.alone,)
        return [made for part in parts for made in _replace(graph, part, new)]
    serving, like = site.serving, value(site.tensors["x"])
    call: Callable[..., object] = getattr(torch.ops.graphfuse, serving.name).default
    with graph.inserting_before(place):
        rows = {name: _as_rows(graph, site, name, t) for name, t in tensors.items()}
        numbers = (_number(name, site.numbers[name], like) for name in serving.numbers)
        made = graph.call_function(call, (*map(rows.get, serving.operator.tensors), *numbers))
        if site.groups > 1:
            made.meta.update(rows["x"].meta)
            made = _viewed(graph, made, (*value(site.out).shape,))
        results = [made] if site.total is None else [graph.call_function(operator.getitem, (made, i)) for i in (0, 1)]
    for old, result in zip((site.out, site.total), results, strict=False):
        result.meta.update({k: v for k, v in old.meta.items() if k in (*KEYS, "stack_trace")})
        old.replace_all_uses_with(result, lambda user: made < user)  # those before are of the site, and go
        new[old] = result
    return [site]


def _place(graph: Graph, site: NormSite, tensors: Collection[Node]) -> Node | None:
    """Before which node the operator fits: a residual sum, or, if what it reads is made later, the norm's result, where
    nobody else reads the sum before that. None for nowhere, as where something is changed in place between the two."""
    if site.total is None:
        return site.out
    order = {node: place for place, node in enumerate(graph.nodes)}
    if any(changes(node) and order[site.total] < order[node] < order[site.out] for node in graph.nodes):
        return None
    if all(order[t] < order[site.total] for t in tensors):
        return site.total
    own = {*surroundings.between((site.out,), (site.total, *tensors)), site.out}
    return site.out if all(order[user] > order[site.out] for user in site.total.users if user not in own) else None


def _number(name: str, number: object, x: torch.Tensor) -> float | int:
    """A symbolic one becomes its value, which Dynamo guards, as for torch's own layer norm."""
    if name == "dim":
        return number
    return epsilon(None if number is None else float(number), x)


def _as_rows(graph: Graph, site: NormSite, name: str, node: Node) -> Node:
    """A tensor as the operator takes it, by the name that it has there."""
    extents = (*value(node).shape,)
    if name in _VECTORS:
        extents = (site.groups, -1) if site.groups > 1 else (-1,)
        return node if len(extents) == value(node).dim() else _viewed(graph, node, extents)
    like = value(site.tensors["x"])
    if name in _PER_SAMPLE and len(extents) < like.dim():
        return _viewed(graph, node, (like.shape[0], *(1 for _ in like.shape[1:-1]), like.shape[-1]))
    if site.groups > 1:
        return _viewed(graph, node, (*extents[:-1], site.groups, extents[-1] // site.groups))
    return node


def _viewed(graph: Graph, node: Node, extents: tuple[int | torch.SymInt, ...]) -> Node:
    """A view, with one extent at most that is not known."""
    known = [n if isinstance(n, int) else -1 for n in extents]
    made = graph.call_function(_view, (node, known))
    for key in KEYS:
        if key in node.meta:
            made.meta[key] = node.meta[key].view(known)
    return made
