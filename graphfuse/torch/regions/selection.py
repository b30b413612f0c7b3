"""Selection of the regions of a compiled graph that are replaced, and the reasons why others stay with inductor."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Sequence

from torch.fx import Graph, GraphModule, Node

from graphfuse.base.device import Device
from graphfuse.base.wording import counted, with_article
from graphfuse.functional.tensor_parameter import Shape
from graphfuse.torch.analysis import cost, inductor, surroundings
from graphfuse.torch.analysis.aten_calls import wrongly_typed
from graphfuse.torch.analysis.cost import Candidate, MeasuredCase
from graphfuse.torch.analysis.meaning import (
    called_name,
    has_gradient,
    hint,
    read_extents_of_inputs,
    recorded_result,
    same,
    value,
    write_constant_types,
)
from graphfuse.torch.analysis.neighbours import ReplacedNodes, elements, is_small, largest
from graphfuse.torch.analysis.out_of_place import write_out_of_place
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.regions import over_ranks
from graphfuse.torch.regions.choose import TorchRegion, device_of, find, reduces_rows_and_parts
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.pair_turns import turn_of
from graphfuse.torch.regions.region_pairs import join_pairs
from graphfuse.torch.regions.replace import fits, replace
from graphfuse.torch.regions.rotations import write_turns

Verdicts = list[tuple[TorchRegion, str]]
"""Regions, and why they are not replaced; "" for those that are."""


def replace_in(module: GraphModule, declines: bool) -> tuple[Verdicts, dict[Node, str]]:
    """Replaces the regions of a graph. Returns also the reductions that are in no region, and why.

    declines: whether regions that inductor computes as fast are not replaced.
    """
    graph = module.graph
    write_out_of_place(graph)
    read_extents_of_inputs(graph)
    write_constant_types(graph)
    write_turns(graph)
    around = surroundings.graph_parts(graph)
    unusable = dict.fromkeys(wrongly_typed(graph), "eager mode computes it in another type than the graph tells")
    unusable |= {n: why for n in graph.nodes if (why := _why_unusable(n, around))}
    parts = {n: number for n, number in around.number.items() if n not in unusable}
    others = dict[Node, str]()
    chosen = (
        part
        for region in find(graph, parts, why_left=others)
        for part in _without_unread_selections(graph, region, others)
    )
    fitting = (part for region in chosen for part in _fitting_regions(graph, region))
    found = [part for region in fitting for part in _trainable_regions(graph, region)]
    reasons = _why_declined(found) if declines else {}
    of_parts = ((region.outputs[0], region.why_parts) for region in found if region.why_parts)
    reasons |= {node: f"{reasons[node]}; {why}" for node, why in of_parts if node in reasons}
    reasons |= {r.outputs[0]: why for r in found if r.outputs[0] not in reasons and (why := _why_untrainable_region(r))}
    found = join_pairs(graph, found, {node for node, why in reasons.items() if why})
    whys = dict(replace(module, [region for region in found if not reasons.get(region.outputs[0])]))
    verdicts = [(region, reasons.get(region.outputs[0]) or whys[region]) for region in found]
    return verdicts, others | {n: why for n, why in unusable.items() if inductor.is_reduction(n)}


def _why_unusable(node: Node, around: surroundings.GraphParts) -> str:
    """Reason in the surroundings of a node why no region may have it; "" if one may."""
    if node in around.transformed:
        return "it is differentiated by torch.func, which operators are not for"
    if node in around.nested:
        return "it is in a transform of torch.func"
    if any(map(surroundings.has_side_effect, node.users)):
        return "it is changed, or has a hook"
    for t in map(recorded_result, (node, *node.all_input_nodes)):
        if hasattr(type(t), "__tensor_flatten__") and type(t).__name__ != "DTensor":
            return f"it computes with {with_article(type(t).__name__)}"
    return ""


def _without_unread_selections(graph: Graph, region: TorchRegion, why_left: dict[Node, str]) -> list[TorchRegion]:
    """The region; or, if it takes elements by an index from rows that it does not read otherwise, regions of its other
    nodes."""
    by_number = {n for n in region.nodes if inductor.takes_by_number(n)}
    if not by_number:
        return [region]
    through = {*region.nodes} - by_number
    read = _ancestors((n for n in through if inductor.is_reduction(n) or n in region.outputs), through)
    whole = {n for n, one in zip(region.inputs, region.program.inputs, strict=True) if one.extents.whole}
    alone = {n for n in by_number if whole & _ancestors(n.all_input_nodes, through) - read}
    if not alone:
        return [region]
    why_left |= dict.fromkeys(alone, "nothing else reads the rows: torch reads the elements that are named")
    others = dict.fromkeys((n for n in region.nodes if n not in alone), 0)
    return [part for one in find(graph, others) for part in _without_unread_selections(graph, one, why_left)]


def _ancestors(nodes: Iterable[Node], through: Container[Node]) -> set[Node]:
    """Nodes, and all that they are computed from. through: the nodes whose inputs are followed."""
    return {*reachable(nodes, lambda node: node.all_input_nodes if node in through else ())}


def _fitting_regions(graph: Graph, region: TorchRegion) -> list[TorchRegion]:
    """The region; or, if a node prevents that it becomes one operator, the regions of its nodes on both sides of
    that."""
    node, is_fit = fits(graph, region, region.inputs)
    sides = {n: n > node for n in region.nodes}
    if is_fit or len({*sides.values()}) == 1:
        return [region]
    return [part for one in find(graph, sides) for part in _fitting_regions(graph, one)]


def _trainable_regions(graph: Graph, region: TorchRegion) -> list[TorchRegion]:
    """The region, if kernels make its gradients. Otherwise smaller ones: of rows, or of parts of them, alone; without
    rotations of pairs; or without operations on vectors alone."""
    if not _why_untrainable_region(region):
        return [region]
    is_of_both = reduces_rows_and_parts(region.program.steps)
    straight = [n for n in region.nodes if is_of_both or turn_of(n) is None]
    if is_of_both or len(straight) < len(region.nodes):
        smaller = find(graph, dict.fromkeys(straight, 0), together=not is_of_both)
        return [part for one in smaller for part in _trainable_regions(graph, one)]
    own = [n for n in region.nodes if not all(map(_is_vector, n.all_input_nodes))]
    return len(own) < len(region.nodes) and find(graph, dict.fromkeys(own, 0)) or [region]


def _is_vector(node: Node) -> bool:
    t = value(node)
    return t is None or sum(not same(n, 1) for n in t.shape) <= 1


def _why_declined(found: Sequence[TorchRegion]) -> dict[Node, str]:
    candidates, others = list[Candidate](), dict[Node, str]()
    for region in found:
        key, is_training = region.outputs[0], _is_training(region)
        if value(key).device.type != cost.DEVICE:
            others[key] = ELSEWHERE
            continue
        if why := _why_few_long_rows(region) or _why_other_layout(region):
            others[key] = why
            continue
        if any(map(over_ranks.partial_of_sum, region.inputs)):
            continue  # inductor's kernels cannot read memory of other ranks
        if why := _why_small_and_strided(region):
            others[key] = why
            continue
        if any(step.op == "turn_pairs" for step in region.program.steps):
            continue  # one kernel moves the fewest bytes for rotations
        odd = (
            node
            for node, one in zip(region.inputs, region.program.inputs, strict=True)
            if one.extents.has_some_row_axes
        )
        summed, cases = cost.of_samples(odd, _size(region)) if is_training else 0, _cases(region)
        worse = "; ".join(str(case) for case in cases if case.saved <= 0)
        behind = cost.SUMMED if summed else f"inductor is as good ({worse})"
        candidates.append(Candidate(key, replaced_nodes(region), cost.saved(cases) - summed, behind))
    return cost.declined(candidates) | others


def _why_few_long_rows(region: TorchRegion) -> str:
    """Reason why a region is not replaced if inductor spreads its rows over more of a GPU than kernels do; ""
    otherwise."""
    *rows, columns = _extents(region, region.tensors[0].shape)
    count = math.prod(rows)
    if count < _ROWS and columns > _COLUMNS and _is_training(region):
        return (
            f"it has {counted(count, 'row')} of {columns} columns, whose gradients have few multiprocessors; "
            f"accepted: {_ROWS} rows or more, or {_COLUMNS} columns or fewer"
        )
    if not rows and not any(one.extents.whole for one in region.program.outputs):
        return "it makes numbers of a whole tensor: inductor's kernels move the same bytes"
    return ""


def _why_other_layout(region: TorchRegion) -> str:
    """Reason why a region of images is not replaced next to convolutions; "" otherwise. There inductor has channels
    last, and would copy inputs to make the pixels of a channel contiguous."""
    if len(region.columns.axes) == 1 or not any(map(_is_convolution, region.outputs[0].graph.nodes)):
        return ""
    return "next to convolutions inductor keeps channels last in memory, where its rows are not one dimension"


def _why_small_and_strided(region: TorchRegion) -> str:
    """Reason why a small region is not replaced if its rows are not along the last dimension; "" otherwise, and for
    softmax. inductor's kernels begin sooner there."""
    is_softmax = any(step.op in ("softmax", "log_softmax") for step in region.program.steps)
    enough = _ENOUGH[_is_training(region)]
    if not region.program.follows or is_softmax or _size(region) >= enough:
        return ""
    return f"its rows are not along the last dimension; accepted: tensors of {enough >> 20} MiB or more, or a softmax"


def _size(region: TorchRegion) -> int:
    """Bytes of the first input of a region."""
    return math.prod(_extents(region, region.tensors[0].shape)) * region.tensors[0].dtype.itemsize


def _is_convolution(node: Node) -> bool:
    t = value(node)
    return called_name(node).startswith("conv") and t is not None and t.dim() > 3


def _extents(region: TorchRegion, of: Sequence[object]) -> Shape:
    """Extents or strides of the first input of a region, in the order of its program."""
    return tuple(hint(of[d]) for d in region.orders[0])


_ROWS, _COLUMNS = 16, 2**15
"""Fewer rows than the first, of more columns than the second, leave most of a GPU idle."""
_ENOUGH = {True: 4 << 20, False: 12 << 20}
"""Bytes of strided rows from which kernels are faster than inductor's, with gradients and without. On an H200 inductor
was faster at 2 MiB with gradients, and at 8 without; kernels were faster at 4.6 and at 12.25."""


def _cases(region: TorchRegion) -> list[MeasuredCase]:
    """The nearest measured cases of the norm that a region has."""
    program, first = region.program, region.tensors[0]
    norms = [step.op for step in program.steps if step.op in ("rmsnorm", "layernorm")]
    if not norms or first.dtype.itemsize != cost.BYTES:
        return []
    vectors = [t for t, one in zip(region.inputs, program.inputs, strict=True) if one.extents.is_vector]
    has_weights = _is_training(region) and any(value(t).requires_grad for t in vectors)
    is_alone = len(program.steps) == len(program.outputs) == 1
    return cost.cases(norms[0], is_alone, has_weights, [first.shape[d] for d in region.orders[0]])


ELSEWHERE = "it is on no GPU, and inductor is as fast"


def _why_untrainable_region(region: TorchRegion) -> str:
    """Reason why a region whose results have gradients is not replaced; "" if kernels make these, or it has none."""
    if not _is_training(region):
        return ""
    graphs, asked = RegionGraphs.of(region.program.text), dict(zip(region.program.inputs, region.inputs, strict=True))
    made = zip(region.program.outputs, region.outputs, strict=True)
    if zeros := [node for one, node in made if one not in graphs.graded and recorded_result(node).requires_grad]:
        return f"the gradients of {inductor.title(zeros[0])} are zeros, which torch makes and a region does not"
    first = region.tensors[0]
    rows, strides = _extents(region, first.shape), _extents(region, first.stride())
    flags = tuple(value(asked[one]).requires_grad for one in graphs.differentiable)
    return _why_untrainable(graphs, rows, strides, flags, device_of(first.device))


@functools.lru_cache(maxsize=1024)
def _why_untrainable(graphs: RegionGraphs, rows: Shape, strides: Shape, asked: tuple[bool, ...], device: Device) -> str:
    return graphs.why_untrainable(rows, strides, asked, str(device))


def _is_training(region: TorchRegion) -> bool:
    return any(map(has_gradient, region.outputs))


def replaced_nodes(region: TorchRegion) -> ReplacedNodes:
    """The part of a graph that a region replaces."""
    made = tuple(sorted(region.outputs, key=elements, reverse=True))
    most = largest((*region.inputs, *made))
    read = tuple(node for node in region.inputs if not is_small(node, most)) or region.inputs[:1]
    columns = len(region.columns.axes)
    return ReplacedNodes(made, region.inputs, read, frozenset(region.nodes), _is_training(region), columns)
