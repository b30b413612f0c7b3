"""Puts operators in place of the sites of a graph."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.torch.fusion.match import Site
from graphfuse.torch.fusion.meaning import op, value
from graphfuse.torch.operators import epsilon


def rewrite(module: GraphModule, sites: Sequence[Site]) -> list[Site]:
    """Replaces sites, which are of this graph, by ``graphfuse::NAME``, which autograd and AOT know; nodes that nobody
    reads any more are removed. Returns the sites as they were replaced: one whose weight is not made yet where its sum
    is needed is replaced without the sum."""
    graph, new = module.graph, dict[Node, Node]()
    replaced = [_replace(graph, site, new) for site in sites]
    graph.eliminate_dead_code(_has_effects)
    graph.lint()
    module.recompile()
    return replaced


def _has_effects(node: Node) -> bool:
    """Whether a node may do more than compute. Those of sites do not; torch takes methods in place for some that do."""
    return node.op != "get_attr" and op(node) is None


def _replace(graph: Graph, site: Site, new: dict[Node, Node]) -> Site:
    """new: what took the place of a node, by that node, which sites still name."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    tensors = {name: new.get(t, t) for name, t in site.tensors.items()}
    if site.total is not None and any(order[t] > order[site.total] for t in tensors.values()):
        return _replace(graph, site.alone, new)
    serving = site.serving
    call: Callable[..., object] = getattr(torch.ops.graphfuse, serving.name).default
    # A symbolic one becomes its value, which Dynamo guards, as for torch's own layer norm.
    eps = epsilon(None if site.eps is None else float(site.eps), value(site.tensors["x"]))
    arguments = [tensors.get(name) for name in serving.operator.tensors]
    with graph.inserting_before(site.out if site.total is None else site.total):
        made = graph.call_function(call, (*arguments, eps))
        results = [made] if site.total is None else [graph.call_function(operator.getitem, (made, i)) for i in (0, 1)]
    for old, result in zip((site.out, site.total), results, strict=False):
        result.meta.update({k: v for k, v in old.meta.items() if k in ("val", "example_value", "stack_trace")})
        old.replace_all_uses_with(result)
        new[old] = result
    return site
