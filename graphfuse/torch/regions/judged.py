"""Regions in the graphs that are compiled: those that are taken, and why others are left to inductor."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from graphfuse.base.device import Device
from graphfuse.functional.tensor_parameter import Shape
from graphfuse.torch.fusion import cost, generated, surroundings
from graphfuse.torch.fusion.cost import Judged
from graphfuse.torch.fusion.meaning import hint, told, value
from graphfuse.torch.fusion.neighbours import Neighbours, TakenNodes, is_as_large
from graphfuse.torch.regions.choose import TorchRegion, device_of, find
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.replace import replace

Verdicts = list[tuple[TorchRegion, str]]
"""Regions, and why they are left; "" for those that are replaced."""


def replace_in(module: GraphModule, declines: bool, kept: Collection[Node]) -> tuple[Verdicts, dict[Node, Node]]:
    """Replaces the regions of a graph. Also the nodes that have the results now, by those that had them.

    declines: whether those are left that inductor is as good at, which it is wherever there is no GPU. kept: nodes that
    are in none.
    """
    if declines and not any(t.device.type == cost.DEVICE for t in map(value, module.graph.nodes) if t is not None):
        return [], {}
    around = surroundings.regions(module.graph)
    parts = {n: number for n, number in around.number.items() if n not in kept and _is_usable(n, around)}
    found = find(module.graph, parts)
    reasons = _declined(module, found) if declines else {}
    reasons |= {r.outputs[0]: why for r in found if r.outputs[0] not in reasons and (why := _untrainable(r))}
    replaced, new = replace(module, [region for region in found if not reasons.get(region.outputs[0])])
    whys = dict(replaced)
    return [(region, reasons.get(region.outputs[0]) or whys[region]) for region in found], new


def _is_usable(node: Node, around: surroundings.Regions) -> bool:
    """True if a region may have a node, as far as what surrounds it goes."""
    if node in around.nested or any(map(surroundings.acts, node.users)):
        return False
    tensors = (told(t) for t in (node, *node.all_input_nodes))
    return not any(hasattr(type(t), "__tensor_flatten__") for t in tensors)


def _declined(module: GraphModule, found: Sequence[TorchRegion]) -> dict[Node, str]:
    neighbours, judged = Neighbours(module.graph), list[Judged]()
    for region in found:
        taken = _taken(region)
        odd = (node for node, one in zip(region.inputs, region.program.inputs, strict=True) if one.extents.is_odd)
        summed = cost.of_samples(odd) if taken.is_training else 0
        judged.append(Judged(region.outputs[0], taken, neighbours.of(taken), -summed, cost.SUMMED))
    unmeasured = {one.key: _UNMEASURED for one, region in zip(judged, found, strict=True) if _is_spread(region, one)}
    return cost.declined([one for one in judged if one.key not in unmeasured]) | unmeasured


_UNMEASURED = "its rows are not along the last dimension: no gradients of such rows were measured beside inductor's"


def _is_spread(region: TorchRegion, one: Judged) -> bool:
    return region.program.follows and one.taken.is_training


def _untrainable(region: TorchRegion) -> str:
    """Why a region is left whose results have gradients; "" where kernels make these, or it has none."""
    if not _is_training(region):
        return ""
    graphs, asked = RegionGraphs.of(region.program.text), dict(zip(region.program.inputs, region.inputs, strict=True))
    first, order = value(region.inputs[0]), region.orders[0]
    rows, strides = (tuple(hint(of[d]) for d in order) for of in (first.shape, first.stride()))
    flags = tuple(value(asked[one]).requires_grad for one in graphs.differentiable)
    return _why_untrainable(graphs, rows, strides, flags, device_of(first.device))


@functools.lru_cache(maxsize=1024)
def _why_untrainable(graphs: RegionGraphs, rows: Shape, strides: Shape, asked: tuple[bool, ...], device: Device) -> str:
    return graphs.why_untrainable(rows, strides, asked, str(device))


def _is_training(region: TorchRegion) -> bool:
    return any(isinstance(t := told(node), torch.Tensor) and t.requires_grad for node in region.outputs)


def _taken(region: TorchRegion) -> TakenNodes:
    made = tuple(sorted(region.outputs, key=lambda node: -_elements(node)))
    whole = tuple(node for node in region.inputs if is_as_large(node, region.inputs[0]))
    return TakenNodes(made, region.inputs, whole, frozenset(region.nodes), _is_training(region))


def _elements(node: Node) -> int:
    return hint(value(node).numel())


def title(region: TorchRegion) -> str:
    """Names of the operations of a region, as reports say them."""
    return ", ".join(dict.fromkeys(generated.title(node) for node in region.nodes if not generated.is_free(node)))
