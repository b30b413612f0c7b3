"""Cross entropy in a graph, and the operator in its place: the loss of each row, which torch then adds up.

Logits that were cast to float32 first, as models do, are read as they were before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.torch.fusion import cost, surroundings
from graphfuse.torch.fusion.cost import Judged
from graphfuse.torch.fusion.meaning import called, exact, is_changed, is_op, value
from graphfuse.torch.fusion.neighbours import TakenNodes
from graphfuse.torch.fusion.new_nodes import put, record, tell_as

NAME = "cross_entropy_loss"
_REDUCTIONS = ("none", "mean", "sum")
_PARAMETERS = {
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing".split(),
    NAME: "input target weight reduction ignore_index label_smoothing".split(),
}
"""By what a node calls: torch's function, or aten's operator, whose reductions are numbers."""


@dataclass(frozen=True)
class Loss:
    """A cross entropy.

    logits, target: the nodes that have them.
    viewed: the view of logits as rows, None where they are rows.
    """

    node: Node
    logits: Node
    viewed: Node | None
    target: Node
    ignore_index: int
    reduction: str
    label_smoothing: float


def find(graph: Graph) -> Iterator[Loss]:
    """Losses of classes by number, along the last of two dimensions, without weights."""
    for node in graph.nodes:
        names = _PARAMETERS.get(called(node))
        if names is None:
            continue
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        given |= {"input": given.get("input", given.get("self"))}
        reduction, smoothing = given.get("reduction", "mean"), given.get("label_smoothing", 0.0)
        reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
        others = (given.get(name) for name in ("weight", "size_average", "reduce"))
        x, target = given["input"], given.get("target")
        if any(one is not None for one in others) or not isinstance(smoothing, float | int) or not _fit(x, target):
            continue
        found = is_op(x, "view")
        source = exact(found.args[0]) if found else exact(x)
        viewed = x if found and source is not found.args[0] else None
        logits = x if found and viewed is None else source
        if not any(map(is_changed, (x, logits, target))) and value(logits).dtype in FLOATS:
            ignored = given.get("ignore_index", -100)
            yield Loss(node, logits, viewed, target, ignored, reduction, float(smoothing))


def _fit(x: object, target: object) -> bool:
    logits, numbers = value(x), value(target)
    if logits is None or numbers is None or logits.dim() != 2 or numbers.dim() != 1:
        return False
    return logits.dtype in FLOATS and numbers.dtype is torch.int64 and numbers.device == logits.device


def replace(module: GraphModule, declines: bool) -> list[tuple[Node, str]]:
    """Replaces losses. Returns the nodes that had them, and why they are left, "" for those that are replaced.

    declines: whether those are left of which inductor makes one kernel with what stands around them.
    """
    around, verdicts, losses = surroundings.regions(module.graph), list[tuple[Node, str]](), [*find(module.graph)]
    judged = [Judged(one.node, _taken(one), 0.0) for one in losses]
    there = [one for one in judged if value(one.taken.read[0]).device.type == cost.DEVICE]
    costly = cost.declined(there) if declines else {}
    for one in losses:
        why = costly.get(one.node, "")
        if one.node in around.nested:
            why = "it is in a transform of torch.func, which operators are not for"
        if not why:
            _replace(module.graph, one)
        verdicts.append((one.node, why))
    module.recompile()
    return verdicts


def _taken(one: Loss) -> TakenNodes:
    own = {one.node, *surroundings.between((one.node,), (one.logits, one.target))}
    is_training = bool(value(one.node).requires_grad)
    return TakenNodes((one.node,), (one.logits, one.target), (one.logits,), frozenset(own), is_training)


def _replace(graph: Graph, one: Loss) -> None:
    aten, loss = torch.ops.aten, value(one.node)
    with graph.inserting_before(one.node):
        logits = one.logits
        if one.viewed is not None:
            cast = one.viewed.args[0]
            logits = graph.node_copy(one.viewed, lambda node: one.logits if node is cast else node)
            kind = value(one.logits).dtype
            record(logits, one.viewed, lambda rows: rows.new_empty(rows.shape, dtype=kind))
        operator = getattr(torch.ops.graphfuse, NAME).default
        made = graph.call_function(operator, (logits, one.target, one.ignore_index, one.label_smoothing, 0.0))
        record(made, one.target, lambda numbers: numbers.new_empty(numbers.shape, dtype=torch.float32))
        if one.reduction != "none":
            made = put(graph, aten.sum.default, made)
        if one.reduction == "mean":
            counted = put(graph, aten.ne.Scalar, one.target, one.ignore_index)
            made = put(graph, aten.div.Tensor, made, put(graph, aten.sum.default, counted))
        if loss.dtype is not torch.float32:
            made = graph.call_function(aten.to.dtype, (made, loss.dtype))
    tell_as(made, one.node)
    one.node.replace_all_uses_with(made)
    for node in (one.node, one.viewed):
        if node is not None and not node.users:
            graph.erase_node(node)
