"""From a match to a row program."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphfuse.dtypes import data_type
from graphfuse.engine import No
from graphfuse.ir import Node, TensorId
from graphfuse.match import Match
from graphfuse.ops import quantize_axis
from graphfuse.patterns.axes import PLACES, Axes
from graphfuse.patterns.layout import RowLayout
from graphfuse.patterns.places import Place, Places
from graphfuse.rows.contraction import contracted
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.expansions import EXPANSIONS, REDUCED
from graphfuse.rows.pairs import Pairs
from graphfuse.rows.picking import Known, picked
from graphfuse.rows.program import SWAP, ColumnSum, RowProgram, Store
from graphfuse.rows.pruning import pruned
from graphfuse.rows.steps import AnyStep, Chain, Column, Load, Number, Operand, Scalar, Step
from graphfuse.rows.views import View, joined

Shortening = Callable[[Sequence[AnyStep], Iterable[Operand]], tuple[tuple[AnyStep, ...], dict[Operand, Operand]]]
"""Steps and what is read beside them -> fewer steps, and by the old values the new ones."""


class Built(NamedTuple):
    """row_extents: of the row axes, outermost first, neighbours joined where one stride serves both in every tensor;
    at least one. columns: extent."""

    row_extents: tuple[int, ...]
    columns: int
    program: RowProgram


@dataclass(frozen=True)
class _Operands:
    """What the input ports of an op are, read from memory in the order in which its expansion asks for them."""

    builder: "Builder"
    node: Node

    def __getitem__(self, port: str) -> Operand:
        in_memory = port not in EXPANSIONS[self.node.op_name].scalars
        return self.builder.operand(dict(self.node.inputs)[port], in_memory)

    def attribute(self, name: str) -> object:
        return self.node.attribute(name)

    def __contains__(self, port: object) -> bool:
        return port in dict(self.node.inputs)


class Builder(Emitter):
    """Makes the program of one match: a value for each tensor, a view for each that lies in memory."""

    def __init__(self, match: Match):
        self.graph, self.subgraph = match.graph, match.subgraph
        self.rows = Axes.of(match)
        super().__init__(self.rows.width)
        self.values: dict[TensorId, Operand] = {}
        self.loaded: dict[TensorId, int] = {}
        self.places = Places(self.rows, self.subgraph)
        self.angles: dict[TensorId, Place] = {}
        self.cut: set[TensorId] = set()
        self.unlike: list[No] = []
        self.stores: list[tuple[TensorId, Chain, Node | None]] = []
        self.sums: list[tuple[TensorId, tuple[Operand, ...]]] = []
        expanded = [node for node in self.subgraph.nodes if node.op_name in EXPANSIONS]
        of_columns = (node.input(port) for node in expanded for port in EXPANSIONS[node.op_name].of_columns)
        self.of_columns = {t for weight in of_columns for t in self._above(weight)}
        self.of_rows = [t for n in expanded for port, t in n.inputs if port in EXPANSIONS[n.op_name].of_rows]
        for t in self.of_rows:
            # One a row, also where nodes before read it of a single row.
            if self.graph.producer.get(t) not in self.subgraph.node_ids:
                self.operand(t, in_memory=True)

    def made(self) -> Built | No:
        for node in self.subgraph.nodes:
            if node.compute is not data_type.FLOAT:
                return No(f"{node} computes in {node.compute.name}; accepted: FLOAT")
            if node.op_name == "block_scale_quantize":
                axis = quantize_axis(self.rows.dim, dict(node.attributes))
                if axis not in self.rows.columns[-1:]:
                    columns = list(self.rows.columns)
                    return No(f"{node} quantizes along axis {axis}, not along the last normalized axis of {columns}")
        for node in self.subgraph.nodes:
            self._node(node)
        for t, _ in self.sums:
            if any(self.rows.tensor(t).dim[axis] != 1 for axis in self.rows.axes):
                return No(f"{self.graph.tensors[t]} is a sum over the rows of each sample; accepted: one over all rows")
        self._shorten(pruned)
        program = self.row_program
        self.steps = list(picked(self.steps, Known(lambda o: program.extent(o).columns, self._is_zero, self._is_plain)))
        for shorter in (pruned, contracted):
            self._shorten(shorter)
        loads = [self.graph.tensors[t] for t in self.loaded]
        by_value = next((t for t in loads if t.by_value), None)
        if by_value:
            return No(
                f"{by_value} is passed by value; accepted where it varies over rows or columns: a tensor in memory"
            )
        if self.unlike:
            return self.unlike[0]
        viewed = {t: self._varies(t) for t in (*self.loaded, *(t for t, _, _ in self.stores))}
        summed = [t for t, _ in self.sums]
        ends = [end.output("scale") for _, _, end in self.stores if end is not None and end.op_name != "reduction"]
        viewed |= dict.fromkeys(ends, (True, True)) | dict.fromkeys(summed, (False, True))
        places = {t: self._placed(t) for t in viewed}
        numbers = tuple(dict.fromkeys(p.numbers for found in places.values() for p in found if p.numbers))
        varying = [p.tensor for t, (rows, _) in viewed.items() if rows for p in places[t]]
        alone = {p.within[0] for found in places.values() for p in found if p.within}
        layout = RowLayout.of(self.rows, [*varying, *numbers], alone)
        views: dict[TensorId, View] = {}
        for t, varies in viewed.items():
            parts = [layout.part(p, *varies, numbers.index(p.numbers) if p.numbers else None) for p in places[t]]
            for part in parts:
                if isinstance(part, No):
                    return part
            first, *more = parts
            if any(part.dtype is not first.dtype for part in more):
                return No(f"{more[0].name!r} is {more[0].dtype.name}, joined to {first.name!r}: {first.dtype.name}")
            views[t] = joined(parts)
        indices = tuple(layout.view(number, True, False) for number in numbers)
        program = RowProgram(
            inputs=tuple(views[t] for t in self.loaded),
            steps=tuple(self.steps),
            stores=_together(tuple(self._store(views, *stored) for stored in self.stores), layout.extents),
            sums=tuple(ColumnSum(views[t], factors) for t, factors in self.sums),
            indices=indices,
        )
        return Built(layout.extents, self.rows.width, program)

    def _above(self, tensor: TensorId | None) -> Iterator[TensorId]:
        """`tensor` and all within the match that it is made from."""
        if tensor is None:
            return
        yield tensor
        made_by = self.graph.producer.get(tensor)
        if made_by in self.subgraph.node_ids:
            for _, t in self.graph.nodes[made_by].inputs:
                yield from self._above(t)

    def _placed(self, t: TensorId) -> tuple[Place, ...]:
        if t in self.angles:
            return (self.angles[t],)
        return self.places.of_input(t) if t in self.loaded else (self.places.of_output(t),)

    def _varies(self, t: TensorId) -> tuple[bool, bool]:
        """Whether a tensor in memory varies over rows and over columns. One row is as good as many: only
        weight and bias are known to be the same for all of them."""
        dim = self.rows.tensor(t).dim
        wide = all(dim[axis] == self.rows.dim[axis] for axis in self.rows.columns)
        if t in self.angles or t in self.cut:
            return True, wide or t in self.angles
        rows, all_rows = ([e[axis] for axis in self.rows.axes] for e in (dim, self.rows.dim))
        varies = any(e != 1 for e in rows) or (rows == all_rows and t not in self.of_columns)
        if t in self.values and isinstance(self.values[t], Chain):
            return varies, self.row_program.extents[self.values[t].index].columns
        return varies, wide and t not in self.of_rows

    @property
    def row_program(self) -> RowProgram:
        """The steps, with inputs of which only the shape is known."""
        inputs = tuple(View(t, "", data_type.FLOAT, (), 1, 1, *self._varies(t)) for t in self.loaded)
        return RowProgram(inputs, tuple(self.steps), ())

    def operand(self, t: TensorId, in_memory: bool = False) -> Operand:
        if t not in self.values:
            tensor = self.graph.tensors[t]
            # Of one row of one column all tensors have one element, and are rows as they are elsewhere.
            if tensor.elements == 1 and not in_memory and (tensor.by_value or math.prod(self.rows.dim) != 1):
                return Scalar.of(tensor)
            self.values[t] = Load(self.loaded.setdefault(t, len(self.loaded)))
        return self.values[t]

    def _is_zero(self, o: Operand) -> bool:
        return o == Number(0.0) or (isinstance(o, Scalar) and self.graph.tensors[o.tensor].value == 0.0)

    def _is_plain(self, o: Load) -> bool:
        places = self._placed(list(self.loaded)[o.index])
        return [(p.within, p.numbers, p.of_pairs) for p in places] == [(None, None, None)]

    def _chain(self, t: TensorId) -> Chain:
        value = self.operand(t, in_memory=True)
        return value if isinstance(value, Chain) else self.step(Step("identity", (("input", value),)))

    def rounded(self, t: TensorId | None) -> data_type | None:
        """What a value is rounded to for those in the match who read it: a stored one, and one whose type is
        not what its node computes in."""
        if t is None or not set(self.graph.consumers.get(t, ())) & set(self.subgraph.node_ids):
            return None
        dtype = self.graph.tensors[t].dtype
        return None if dtype is data_type.FLOAT else dtype

    def _node(self, node: Node) -> None:
        if node.op_name in EXPANSIONS:
            self._expand(node)
        elif node.op_name == "block_scale_quantize":
            y, scale = node.output("Y"), node.output("scale")
            alone = y not in self.subgraph.outputs  # nobody wants the elements
            self.stores.append((scale if alone else y, self._chain(node.input("input")), node))
            return
        elif node.op_name == "reduction":
            output = node.output("output")
            if self.graph.tensors[output].dim != self.rows.per_row:
                self.stores.append((output, self._chain(node.input("input")), node))
                return
            value = REDUCED[node.attribute("mode")](self, self.operand(node.input("input"), in_memory=True))
            self._is(output, value)
        elif node.op_name == "rotate_pairs":
            self._rotate(node)
        elif node.op_name == "scatter_rows" or self.rows.cut(node) is not None:
            x, made = node.input("input"), node.output("output")
            before = self.places.made_by(x)
            if node.op_name != "slice" and before is not None and self.rows.cut(before) is not None:
                x = before.input("input")
            if made in self.subgraph.outputs:
                self.cut.add(made)
                self.stores.append((made, self._chain(x), None))
            return
        elif node.op_name in PLACES:
            return
        elif node.op_name == "gen_index":
            output = node.output("output")
            self.values[output] = self.step(Step("identity", (("input", Column()),), (), self.rounded(output)))
        else:
            operands = tuple((port, self.operand(t)) for port, t in node.inputs)
            output = node.output("output")
            step = Step(node.op_name, operands, node.attributes, self.rounded(output))
            self.values[output] = self.step(step)
        written = self.subgraph.outputs
        self.stores += [(t, self.values[t], None) for _, t in node.outputs if t in written and t in self.values]

    def _expand(self, node: Node) -> None:
        for port, value in EXPANSIONS[node.op_name].of(self, _Operands(self, node)).items():
            t = node.output(port)
            if t is None:
                continue
            if isinstance(value, tuple):
                self.sums += [(t, value)] * (t in self.subgraph.outputs)
            else:
                self._is(t, value)

    def _rotate(self, node: Node) -> None:
        pairs = Pairs(self.graph.tensors[node.input("cos")].dim[-1], node.attribute("interleaved"))
        cos, sin = self._angles(node.input("cos"), pairs, 1.0), self._angles(node.input("sin"), pairs, 0.0)
        x = self.operand(node.input("input"), in_memory=True)
        other = self.step(Step(SWAP, (("input", x),), (("count", pairs.count), ("interleaved", pairs.interleaved))))
        how = "fnma" if node.attribute("inverse") else "fma"
        self._is(node.output("output"), self.op(how, a=other, b=sin, c=self.op("mul", a=x, b=cos)))

    def _angles(self, t: TensorId, pairs: Pairs, otherwise: float) -> Load:
        place = self.places.of_angles(t, pairs, otherwise)
        if t in self.loaded and self.angles.get(t) != place:
            self.unlike.append(
                No(f"{self.graph.tensors[t]} is read in more ways than one; accepted: as cos, or as sin")
            )
        self.angles[t] = place
        return Load(self.loaded.setdefault(t, len(self.loaded)))

    def _is(self, t: TensorId, value: Chain) -> None:
        """What is made of a value is rounded for those who read it; the steps that it is made with are not."""
        dtype = self.rounded(t)
        if dtype is None:
            self.values[t] = value
        elif any(o == value for step in self.steps for _, o in step.operands):
            self.values[t] = self.step(Step("identity", (("input", value),), (), dtype))
        else:
            self.steps[value.index] = replace(self.steps[value.index], rounded=dtype)
            self.values[t] = value

    def _shorten(self, shorter: Shortening) -> None:
        read = [value for _, value, _ in self.stores] + [o for _, factors in self.sums for o in factors]
        steps, moved = shorter(self.steps, read)
        self.steps = list(steps)
        left = ((t, o) for t, o in self.values.items() if o in moved or not isinstance(o, Chain))
        self.values = {t: moved.get(o, o) for t, o in left}
        self.stores = [(t, moved[value], node) for t, value, node in self.stores]
        self.sums = [(t, tuple(moved.get(o, o) for o in factors)) for t, factors in self.sums]

    def _store(self, views: Mapping[TensorId, View], t: TensorId, value: Chain, end: Node | None) -> Store:
        if end is None:
            return Store(views[t], value)
        if end.op_name == "reduction":
            return Store(views[t], value, amax=True)
        if t == end.output("scale"):
            return Store(views[t], value, end.attribute("block_size"), scales_of=end.attribute("element_type"))
        return Store(views[t], value, end.attribute("block_size"), views[end.output("scale")])


def _together(stores: tuple[Store, ...], extents: tuple[int, ...]) -> tuple[Store, ...]:
    """One store for tensors that have all rows of a value between them, each some."""
    groups: list[list[Store]] = []
    for store in stores:
        if groups and _follows(groups[-1][-1], store):
            groups[-1].append(store)
        else:
            groups.append([store])
    for first, *_, last in (group for group in groups if len(group) > 1):
        axis, begin, _ = first.view.place.span
        if (begin, last.view.place.span[2]) != (0, extents[axis]):
            return stores
    return tuple(replace(group[0], view=joined([store.view for store in group])) for group in groups)


def _follows(before: Store, store: Store) -> bool:
    """Whether a tensor has the rows of a value that follow those of the one before."""
    one, two = before.view.place, store.view.place
    if not one.span or not two.span or one.numbers or two.numbers:
        return False
    (axis, _, end), (its, first, _) = one.span, two.span
    alike = (before.value, before.view.dtype) == (store.value, store.view.dtype)
    return alike and (axis, end) == (its, first)
