"""Cross entropy in graphs that inductor compiles, split into the loss of each row, which can be a step of a region, and
a sum.

The loss of rows reads the logits before they are cast to float32 and viewed as rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.ops.losses import MOST_IGNORED
from graphfuse.torch.analysis import inductor, surroundings
from graphfuse.torch.analysis.meaning import (
    arguments,
    called_name,
    dtype,
    is_changed,
    is_op,
    norm_type,
    same,
    value,
    without_casts,
)
from graphfuse.torch.analysis.new_nodes import copy_records, insert, record
from graphfuse.torch.regions.replace import erase_unread

_REDUCTIONS = ("none", "mean", "sum")
_PARAMETERS = {
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing".split(),
    "cross_entropy_loss": "input target weight reduction ignore_index label_smoothing".split(),
    "nll_loss": "input target weight size_average ignore_index reduce reduction".split(),
}
"""Names of parameters, by the function of torch or operator of aten that a node calls. aten has reductions as numbers.
nll_loss of a log_softmax is the cross entropy of the softmax's input."""


@dataclass(frozen=True)
class Loss:
    """A cross entropy in a graph. logits, target: the nodes that have them. Logits may have several dimensions of
    rows."""

    node: Node
    logits: Node
    target: Node
    ignore_index: int
    reduction: str
    label_smoothing: float


class RowLosses:
    """Losses of a graph, rewritten as losses of rows. Regions may include them; `restore` undoes the others."""

    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        around = surroundings.graph_parts(self._graph)
        found = [one for one in _losses(self._graph) if one.node not in around.nested]
        self._divided = [(one, *self._divide(one)) for one in found]
        if found:
            erase_unread(self._graph)

    def _divide(self, one: Loss) -> tuple[Node, Node]:
        """Nodes of the rows' losses, and of the loss that replaces the original one."""
        graph, aten, loss = self._graph, torch.ops.aten, value(one.node)
        extents = [n if isinstance(n, int) else -1 for n in value(one.logits).shape[:-1]]
        with graph.inserting_before(one.node):
            logits, target = one.logits, one.target
            if extents.count(-1) > 1 or 0 in extents:
                logits = insert(graph, torch.flatten, logits, 0, -2)
            elif len(extents) > 1:
                target = insert(graph, aten.view.default, target, extents)
            options = one.ignore_index, one.label_smoothing, 0.0
            rows = graph.call_function(torch.ops.graphfuse.cross_entropy_loss.default, (logits, target, *options))
            copy_records(rows, one.node)
            has_gradient = loss.requires_grad
            record(rows, target, lambda t: t.new_empty(t.shape, dtype=torch.float32).requires_grad_(has_gradient))
            made = (
                insert(graph, torch.flatten, rows) if one.reduction == "none" else insert(graph, aten.sum.default, rows)
            )
            if one.reduction == "mean":
                counted = insert(graph, aten.ne.Scalar, one.target, one.ignore_index)
                made = insert(graph, aten.div.Tensor, made, insert(graph, aten.sum.default, counted))
            if loss.dtype is not torch.float32:
                made = insert(graph, aten.to.dtype, made, loss.dtype)
        self._replace(one.node, made)
        return rows, made

    def _replace(self, old: Node, new: Node) -> None:
        copy_records(new, old)
        old.replace_all_uses_with(new)
        self._graph.erase_node(old)

    def restore(self) -> None:
        """Replace the losses that no region includes by torch's."""
        for one, rows, made in self._divided:
            if one.reduction != "none" and rows.users and made.users:
                with self._graph.inserting_before(made):
                    loss = self._torchs(rows, one.reduction)
                    self._replace(made, insert(self._graph, torch.ops.aten.to.dtype, loss, value(made).dtype))
                erase_unread(self._graph)
            if rows.users:
                with self._graph.inserting_before(rows):
                    loss = insert(self._graph, torch.ops.aten.view_as.default, self._torchs(rows, "none"), rows.args[1])
                self._replace(rows, loss)

    def _torchs(self, rows: Node, reduction: str) -> Node:
        """Node of torch's loss, in float32."""
        logits, target, ignored, smoothing, _ = rows.args
        given = [insert(self._graph, torch.flatten, logits, 0, -2), insert(self._graph, torch.flatten, target)]
        if value(logits).dtype is not torch.float32:
            given[0] = insert(self._graph, torch.ops.aten.to.dtype, given[0], torch.float32)
        return insert(self._graph, F.cross_entropy, *given, None, None, ignored, None, reduction, smoothing)


def _losses(graph: Graph) -> Iterator[Loss]:
    """Cross entropies of a graph: of logits with two dimensions, classes last, and class numbers, without class
    weights."""
    for node in graph.nodes:
        names = _PARAMETERS.get(called_name(node))
        if names is None:
            continue
        given = arguments(node, *names)
        given |= {"input": given.get("input", given.get("self"))}
        reduction, smoothing = given.get("reduction", "mean"), given.get("label_smoothing", 0.0)
        reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
        others = (given.get(name) for name in ("weight", "size_average", "reduce"))
        x, target = given["input"], given.get("target")
        if any(one is not None for one in others) or not isinstance(smoothing, float | int) or not _fit(x, target):
            continue
        logits, ignored = _unviewed(x), given.get("ignore_index", -100)
        logits = _normalized(x, logits) if called_name(node) == "nll_loss" else logits
        if logits is None or not isinstance(ignored, int) or abs(ignored) >= MOST_IGNORED:
            continue
        if not any(map(_may_change, (x, logits, target))) and value(logits).dtype in FLOATS:
            yield Loss(node, logits, target, ignored, reduction, float(smoothing))


def _fit(x: object, target: object) -> bool:
    logits, numbers = value(x), value(target)
    if logits is None or numbers is None or logits.dim() != 2 or numbers.dim() != 1:
        return False
    return logits.dtype in FLOATS and numbers.dtype is torch.int64 and numbers.device == logits.device


def _unviewed(x: Node) -> Node:
    """Node that has the same rows before casts to a wider type and before one view as rows."""
    source = without_casts(x)
    of = is_op(source, "view")
    before, rows = value(of.args[0]) if of else None, value(source)
    if (
        before is None
        or before.dim() < 2
        or before.dtype is not rows.dtype
        or not same(before.shape[-1], rows.shape[-1])
    ):
        return source
    # An index may select a part of the rows.
    return without_casts(of.args[0]) if same(before.numel(), rows.numel()) else source


def _normalized(x: Node, source: Node) -> Node | None:
    """Logits of the log_softmax that `source` is; None if it is no log_softmax of the last dimension, or has readers
    that do not lead to x alone."""
    node = x
    while node is not source and len(node.users) == 1:
        node = node.args[0]
    if called_name(node) != "log_softmax" or len(node.users) != 1 or value(node) is None:
        return None
    given = arguments(node, "input", "dim")
    kind, is_last = dtype(given["input"]), given.get("dim") in (-1, value(node).dim() - 1)
    return _unviewed(given["input"]) if is_last and dtype(node) in (kind, norm_type(kind)) else None


def _may_change(node: object) -> bool:
    """True if something changes a node's values in place, or those of a tensor that it may view. The rewritten loss
    reads the original logits later than the program copies them."""
    while isinstance(node, Node):
        if is_changed(node):
            return True
        node = node.args[0] if node.args and inductor.is_free(node) else None
    return False
