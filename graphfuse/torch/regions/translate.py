"""Translation of the nodes of an FX graph to steps of op graphs, by the calls of aten that each makes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from graphfuse.base.wording import with_article
from graphfuse.ops import OPS
from graphfuse.torch.analysis.aten_calls import Call, calls_of, parts_of
from graphfuse.torch.analysis.meaning import as_sequence, has_gradient, hint, recorded_result, tensors
from graphfuse.torch.analysis.meaning import value as value_of
from graphfuse.torch.regions.call_translation import (
    ROUNDED,
    AlongTwoAxes,
    CallTranslation,
    NoOp,
    OwnedStep,
    Untranslated,
    Value,
)
from graphfuse.torch.regions.columns import COLUMNS, NOT_ONE_DIMENSION, PARTS, ColumnAxes
from graphfuse.torch.regions.composites import COMPOSITES, as_number, is_number
from graphfuse.torch.regions.decomposition_check import is_equivalent
from graphfuse.torch.regions.groups import Groups
from graphfuse.torch.regions.pair_turns import source_of_turn_around

Known, Tensors = dict[torch.Tensor, Value], set[torch.Tensor]
Operators = tuple[torch._ops.OpOverload, ...]
_DECLINED = "no kernel computes it with its neighbours"


class TranslatedGraph:
    """Steps of all nodes of a graph that can be translated.

    values: by node, its value or values. steps: in order. why: by node that cannot be translated, the reason. declined:
    by other nodes that are in no region, the reason. node_of: the node of a tensor. unread: nodes that are not read,
    and stay as they are. in_memory: nodes that are translated, with readers that read their results from memory.
    reduced: the columns that a node reduces.

    columns: those of rows. groups: parts of rows that are treated as rows. inside: nodes that have groups as a
    dimension; all others are translated as if they had it. of_rows: rows stay rows, and nodes are translated as they
    are. Then nodes inside have the number of parts along axis -1, which elsewhere is that of the columns, and the
    columns of parts along axis 0.
    """

    def __init__(
        self,
        columns: ColumnAxes = COLUMNS,
        groups: Groups | None = None,
        inside: Container[Node] = (),
        of_rows: bool = False,
    ) -> None:
        self._columns, self.reduced = columns, dict[Node, ColumnAxes]()
        self.parts = groups if of_rows else None
        self._groups, self._inside = groups, inside
        self._undivided: dict[torch.Tensor, Node] = {}
        self._of_groups: dict[Node, object] = {}
        self.values: dict[Node, object] = {}
        self.steps: list[OwnedStep] = []
        self.why: dict[Node, str] = {}
        self.declined: dict[Node, str] = {}
        self.node_of: dict[torch.Tensor, Node] = {}
        self.unread: set[Node] = set()
        self.in_memory: set[tuple[Node, Node]] = set()

    def recorded(self, node: Node, reader: Node | None = None) -> object:
        """Tensor or tensors that were recorded for a node, viewed as groups if nodes are; None for one that cannot be.
        reader: a node, which reads the tensor as it is if it has groups itself."""
        made = recorded_result(node)
        if self._groups is None or not self.parts and (node in self._inside or reader in self._inside):
            return made
        if self.parts and node not in self._inside:
            return made
        if node not in self._of_groups:
            if self.parts:
                made = map_aggregate(made, self.parts.unflattened)
            else:
                made = self._groups.of(made) if isinstance(made, torch.Tensor) else None
            self._of_groups[node] = made
        return self._of_groups[node]

    def why_left(self, node: Node) -> str:
        """Reason why no region has a node; "" for a node that is not read."""
        return self.declined.get(node, _DECLINED) if node in self.values else self.why.get(node, "")

    def columns(self, part: int = 0) -> ColumnAxes:
        """Columns of rows; of parts of rows if `part` is not 0."""
        return PARTS if part else self._columns

    def part(self, node: Node) -> int:
        """Columns of the parts of rows that a node computes with; 0 for rows."""
        return self.parts.columns if self.parts and node in self._inside else 0

    def undivided(self, value: Value) -> Value:
        """Value as a program reads it: whole rows instead of their view as parts."""
        node = self._undivided.get(value.tensor)
        if node is None:
            return value
        t = recorded_result(node)
        self.node_of[t] = node
        return Value(t)

    def part_read(self, node: Node, value: Value) -> int:
        """Columns of the parts in which a program reads the value of a node; 0 for rows."""
        if value.step is not None or self.parts is None:
            return self.part(node)
        return self.parts.columns if value.aligned()[-1:] == (0,) else 0

    def _add_view_of_groups(self, node: Node) -> bool:
        """True if a view of rows as groups, or back, was added. It changes nothing here but the axes of parts."""
        of, made = self.values.get(node.args[0]), self.recorded(node)
        if not isinstance(of, Value) or of.step is None:
            self.values[node] = self._read(made, node)
            self.node_of[made] = node
            if self.part(node):
                self._undivided[made] = node.args[0]
        elif self.parts is None and len(of.aligned()) == made.dim():
            self.values[node] = replace(of, tensor=made)
        elif self.parts is None:  # the value is one a row
            self.why[node] = "a view that moves elements"
            return False
        elif of.once is not None:
            self.why[node] = "it views what is repeated"
            return False
        else:
            axes = (*of.aligned(), 0) if self.part(node) else of.aligned()[:-1]
            self.values[node] = replace(of, tensor=made, axes=axes)
        return True

    def _read(self, t: torch.Tensor, reader: Node) -> Value:
        """Value of a tensor that no step makes."""
        return Value(t, axes=tuple(range(1 - t.dim(), 1)) if self.part(reader) else None)

    def add(self, node: Node) -> bool:
        """True if a node is translated. The nodes that it reads have been added before."""
        if self._groups is not None and (self._groups.is_split(node) or self._groups.is_joined(node)):
            return self._add_view_of_groups(node)
        if (self._groups is None or self.part(node)) and (whole := source_of_turn_around(node)) is not None:
            self.values[node] = dict(self._tensors(whole, node)).popitem()[1]
            return True
        aliases: dict[torch.Tensor, torch.Tensor] = {}
        found = None if self._mixes_rows_and_groups(node) else calls_of(node, aliases, lambda t: self.recorded(t, node))
        if found is None:
            self.why[node] = "it is no operation on tensors that programs have"
            return False
        calls, made = found
        # Tensors that are smaller than the rows and have several readers are read from memory: no kernel of rows makes
        # them.
        kept = (t for t in node.all_input_nodes if len(t.users) > 1 and self._is_side_input(t, node))
        self.in_memory |= {(t, node) for t in kept}
        known = {aliases[t]: v for a in node.all_input_nodes for t, v in self._tensors(a, node)}
        with_gradient = filter(has_gradient, node.all_input_nodes)
        graded = {aliases[t] for a in with_gradient for t, _ in self._tensors(a, node)}
        before = len(self.steps)
        try:
            for call in calls:
                self._call(node, call, known, graded)
            value = _values_of(made, known, _results_read(node))
            self._check_leaves(node, self.steps[before:])
            of_whole_rows = self._groups is not None and self.parts is None and node not in self._inside
            # Whole rows have other columns than their groups.
            if of_whole_rows and not all(OPS[step.op].pointwise for step in self.steps[before:]):
                raise Untranslated("it computes with whole rows, where others compute with parts of them")
            if isinstance(value, Value) and value.step is None:  # a view of an input
                self.node_of[value.tensor] = node
            self.values[node] = value
        except Untranslated as error:
            del self.steps[before:]
            beside = {(t, node) for t in node.all_input_nodes if self._is_side_input(t, node)} - self.in_memory
            if isinstance(error, AlongTwoAxes) and beside:  # in memory, their axes are decided by the reader
                self.in_memory |= beside
                return self.add(node)
            self.why[node] = str(error)
            return False
        return True

    def _is_side_input(self, t: Node, reader: Node) -> bool:
        """True for a tensor of several dimensions that pointwise steps make, and that is smaller than the rows."""
        found, made = self.values.get(t), value_of(reader)
        if self._groups is not None or made is None or not isinstance(found, Value):
            return False
        is_small = 1 < found.tensor.dim() and hint(found.tensor.numel()) < hint(made.numel())
        return is_small and found.step is not None and all(OPS[one.op].pointwise for one in found.step.upstream())

    def _mixes_rows_and_groups(self, node: Node) -> bool:
        """True if a node computes with groups and with what was computed from whole rows."""
        outside = (self.values.get(t) for t in node.all_input_nodes if t not in self._inside)
        return node in self._inside and any(isinstance(v, Value) and v.step is not None for v in outside)

    def _tensors(self, node: Node, reader: Node):
        """Recorded tensors of a node, with their values."""
        recorded, value = self.recorded(node, reader), self.values.get(node)
        if reader in self._inside and node not in self._inside or (node, reader) in self.in_memory:
            value = None
        for i, t in enumerate(as_sequence(recorded)):
            if isinstance(t, torch.Tensor):
                one = value[i] if isinstance(value, list | tuple) else value
                if one is None and t is recorded:
                    self.node_of[t] = node
                yield t, one if one is not None else self._read(t, reader)

    def _check_leaves(self, node: Node, steps: Sequence[OwnedStep]) -> None:
        """Raises Untranslated if steps read a tensor of no node, a part of the columns of rows along several
        dimensions, or, with parts of rows, a tensor of fewer dimensions."""
        values = [v for step in steps for v in step.read]
        for v in values:
            shape, extents = tuple(v.shape), self._columns.extents
            if not self._columns.fit(shape, v.aligned()):
                raise Untranslated(
                    f"it reads {shape} together with rows of shape {extents}; accepted: all columns, or none"
                )
            if v.step is None and self._columns.joined(v.tensor, v.aligned()) is None:
                raise Untranslated(f"it reads {shape} with strides {v.tensor.stride()}, whose rows {NOT_ONE_DIMENSION}")
        read = [v for v in values if v.step is None]
        if any(v.tensor not in self.node_of for v in read):
            raise Untranslated("it reads a tensor that is no node's")
        most = max((v.tensor.dim() for v in values), default=0)
        others = (v for v in read if self.part(node) and v.tensor not in self._undivided)
        if any(0 < v.tensor.dim() < most for v in others):
            raise Untranslated("it reads a tensor that is the same for all parts, or rows, together with parts of rows")

    def _call(self, node: Node, call: Call, known: Known, graded: Tensors, within: Operators = ()) -> None:
        """Translates a call. A call that no op computes is translated by torch's decomposition. graded: tensors that
        have gradients. within: operators that are being decomposed."""
        read = tensors(call.arguments)
        if not graded.isdisjoint(read):
            graded.update(tensors(call.results))
        drawing = CallTranslation(self.steps, node, call, known, self.columns(self.part(node)), self.reduced)
        draw = as_number if is_number(call, known) else COMPOSITES.get(call.name)
        try:
            made = as_sequence(draw(drawing) if draw else drawing.by_table())
        except NoOp:
            parts = None if call.computed in within or _rounds_read(call, read, known) else parts_of(call)
            if parts is None:
                raise
            calls, results = parts
            for part in calls:
                self._call(node, part, known, graded, (*within, call.computed))
            if not is_equivalent(call, graded):
                raise Untranslated(f"torch's decomposition of {call.name} has other values or gradients") from None
            made = [known.get(one) for one in results]
        known |= ((t, v) for t, v in zip(call.results, made, strict=False) if v is not None)


def _rounds_read(call: Call, read: Sequence[torch.Tensor], known: Mapping[torch.Tensor, object]) -> bool:
    """True if torch rounds a tensor without dimensions to the type of the others, and the call's parts do not."""
    dtype = call.results[0].dtype
    alone = (t for t in read if not t.dim() and not isinstance(known.get(t), int | float))
    return dtype in ROUNDED and any(t.dtype not in (dtype, torch.bool) for t in alone)


def _results_read(node: Node) -> Container[int]:
    """Numbers of those results of a node that are read."""
    users = [user for user in node.users if user.target is not operator.getitem or user.users]
    parts = [user.args[1] if user.target is operator.getitem else None for user in users]
    return range(sys.maxsize) if None in parts else parts


def _values_of(made: object, known: Known, read: Container[int]) -> object:
    """Values of the result of a node; None for one of several results that is not read."""
    if isinstance(made, torch.Tensor):
        if not isinstance(known.get(made), Value):
            raise Untranslated(f"no op makes its result of {made.dtype}")
        if known[made].tensor.dim() != made.dim():  # torch 2.10 returns another rank for vector norms of one element
            raise Untranslated(f"it has shape {tuple(made.shape)} where the graph was recorded")
        return known[made]
    if isinstance(made, list | tuple):
        return tuple(_values_of(one, known, ()) if i in read else None for i, one in enumerate(made))
    raise Untranslated(f"it makes {with_article(type(made).__name__)}")
