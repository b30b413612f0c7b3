"""From the nodes of an FX graph to steps of op graphs: what each calls of aten, drawn call by call."""

from __future__ import annotations

import operator
import sys
from collections.abc import Container, Mapping, Sequence

import torch
from torch.fx import Node

from graphfuse.torch.fusion.meaning import told
from graphfuse.torch.regions.aten_calls import Call, calls_of
from graphfuse.torch.regions.call_drawing import CallDrawing, OwnedStep, Untranslated, Value
from graphfuse.torch.regions.composites import COMPOSITES


class TranslatedGraph:
    """All of a graph that translates. values: by node, its tensor or tensors. steps: in order. why: for nodes that do
    not translate. node_of: the node that has a tensor, by the tensor's number. unread: nodes that nobody reads, and
    which are left as they are.

    axis: that which rows lie along, counted from the last of the largest tensor. reduced: axes that operations reduce.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis, self.reduced = axis, set[int]()
        self.values: dict[Node, object] = {}
        self.steps: list[OwnedStep] = []
        self.why: dict[Node, str] = {}
        self.node_of: dict[int, Node] = {}
        self.unread: set[Node] = set()
        self.held: list[object] = []  # tensors that numbers are of

    def add(self, node: Node) -> bool:
        """True if a node translates; what it is made of has been added before."""
        aliases: dict[int, torch.Tensor] = {}
        found = calls_of(node, aliases)
        if found is None:
            self.why[node] = "it is no operation on tensors that programs have"
            return False
        calls, made = found
        known = {id(aliases[id(t)]): v for a in node.all_input_nodes for t, v in self._tensors(a)}
        self.held += aliases.values()
        before = len(self.steps)
        try:
            for call in calls:
                self._call(node, call, known)
            value = _like(made, known, _read(node))
            self._check_leaves(self.steps[before:])
            if isinstance(value, Value) and value.step is None:  # a view of what is read
                self.node_of[id(value.tensor)] = node
            self.values[node] = value
        except Untranslated as error:
            del self.steps[before:]
            self.why[node] = str(error)
            return False
        return True

    def _tensors(self, node: Node):
        """Recorded tensors of a node, with their values."""
        recorded = told(node)
        value = self.values.get(node)
        for i, t in enumerate(recorded if isinstance(recorded, list | tuple) else (recorded,)):
            if isinstance(t, torch.Tensor):
                one = value[i] if isinstance(value, list | tuple) else value
                if one is None and t is recorded:
                    self.node_of[id(t)] = node
                yield t, one if one is not None else Value(t)

    def _check_leaves(self, steps: Sequence[OwnedStep]) -> None:
        """Tensors that steps read, of which each must be a node's."""
        read = (v for step in steps for v in step.inputs.values() if isinstance(v, Value) and v.step is None)
        if any(id(v.tensor) not in self.node_of for v in read):
            raise Untranslated("it reads a tensor that is no node's")

    def _call(self, node: Node, call: Call, known: dict[int, Value]) -> None:
        drawing = CallDrawing(self.steps, node, call, known, self.axis, self.reduced)
        draw = COMPOSITES.get(call.name)
        made = draw(drawing) if draw else drawing.by_table()
        for t, value in zip(call.results, made if isinstance(made, tuple) else (made,), strict=False):
            known[id(t)] = value
            self.held.append(t)


def _read(node: Node) -> Container[int]:
    """The numbers of a node's results that somebody reads."""
    users = [user for user in node.users if user.target is not operator.getitem or user.users]
    parts = [user.args[1] if user.target is operator.getitem else None for user in users]
    return range(sys.maxsize) if None in parts else parts


def _like(made: object, known: Mapping[int, Value], read: Container[int]) -> object:
    """Values of what a node returns; None for one of several that nobody reads."""
    if isinstance(made, torch.Tensor):
        if id(made) not in known:
            raise Untranslated("it makes a tensor of none")
        if known[id(made)].tensor.dim() != made.dim():  # torch 2.10 has another for lengths of one element
            raise Untranslated(f"it has shape {tuple(made.shape)} where the graph was recorded")
        return known[id(made)]
    if isinstance(made, list | tuple):
        return tuple(_like(one, known, ()) if i in read else None for i, one in enumerate(made))
    raise Untranslated(f"it makes a {type(made).__name__}")
