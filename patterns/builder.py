"""`Builder`, which makes a row program from a match."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from graphfuse.base.dtypes import FP8, data_type
from graphfuse.contract.engine import No
from graphfuse.op_graph.ir import FrozenTensor, Subgraph, TensorId
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.layout import RowLayout
from graphfuse.patterns.role import PartialMatch
from graphfuse.patterns.roles import ROLES
from graphfuse.patterns.sections import Section
from graphfuse.patterns.values import Values, Written
from graphfuse.rows.clamping import clamped
from graphfuse.rows.contraction import contracted, factors
from graphfuse.rows.division import divided
from graphfuse.rows.pairs import COLUMNS, EachColumnOfPart, EachPart
from graphfuse.rows.picking import KnownOperands, picked
from graphfuse.rows.program import ColumnSum, Extent, Extents, RowProgram, Store
from graphfuse.rows.pruning import pruned
from graphfuse.rows.ranks import MOST_TABLES, over_ranks
from graphfuse.rows.rounding import marked, roundings_joined
from graphfuse.rows.steps import Chain, Load, Operand
from graphfuse.rows.views import ROWS, OfRank, View, joined


class Builder:
    """Builder of the row program of one match: its values, and views of its tensors in memory."""

    def __init__(self, subgraph: Subgraph, axes: Axes):
        self.graph, self.subgraph, self.axes = subgraph.graph, subgraph, axes
        self.matched = PartialMatch(axes, frozenset(subgraph.node_ids), ROLES)
        self.nodes = [(node, ROLES[node.op_name]) for node in subgraph.nodes]
        self.values = Values(subgraph, axes.dim, axes.width)
        expanded = [(node, role.expansion) for node, role in self.nodes if role.expansion is not None]
        self.of_columns = {t for node, e in expanded for port in e.of_columns for t in self._above(node.input(port))}
        self.of_rows = [t for node, e in expanded for port, t in node.inputs if port in e.of_rows]
        self.in_memory: dict[TensorId, Extent] = {}  # extents of tensors in memory, once all nodes are computed

    def build(self) -> tuple[tuple[int, ...], RowProgram] | No:
        """Extents of the row axes, and the program; No if there is none."""
        for node, _ in self.nodes:
            if node.compute is not data_type.FLOAT:
                return No(f"{node} computes in {node.compute.name}; accepted: FLOAT")
        self._compute()
        if self.values.faults:
            return self.values.faults[0]
        self._rewrite()
        for t in (self.graph.tensors[t] for t in self.values.loaded):
            if self.axes.shared(t.id):
                return No(f"{t} has one value a part of a row and is read from memory; accepted: what the match makes")
            if t.by_value:
                return No(f"{t} is passed by value; accepted where it varies over rows or columns: a tensor in memory")
        return self._program()

    def _compute(self) -> None:
        """Adds values, steps and stores of all nodes."""
        for t in self.of_rows:
            # Read as one value per row, even if earlier nodes read it as a scalar.
            if self.matched.made_by(t) is None:
                self.values.operand(t, in_memory=True)
        for node, role in self.nodes:
            role.compute(self.values, self.matched, node)
            self.values.store_outputs(node)

    def _rewrite(self) -> None:
        """Removes, replaces and contracts steps."""
        values = self.values
        values.rewrite(pruned)
        values.rewrite(roundings_joined)
        known = KnownOperands(self._has_columns(), lambda o: values.number(o) == 0, self._is_plain)
        values.rewrite(lambda steps, _: picked(steps, known, self.axes.width))
        has_columns = self._has_columns()
        values.sums = [(t, factors(values.steps, o, has_columns)) for t, o in values.sums]
        values.steps = marked(clamped(values.steps, values.number), values.type_or_number, values.only_written)
        values.unbind()
        values.rewrite(pruned)
        values.rewrite(contracted)
        has_columns, as_fp8 = self._has_columns(), {w.value for w, dtype in values.element_stores if dtype in FP8}
        values.rewrite(lambda steps, read: divided(steps, read, has_columns, values.type_or_number, as_fp8))

    def _program(self) -> tuple[tuple[int, ...], RowProgram] | No:
        """The program, with a view for each tensor in memory."""
        values, varies = self.values, self._varying()
        sections = {t: self._sections(t) for t in varies}
        every = [section for found in sections.values() for section in found]
        numbers = list(dict.fromkeys(number for section in every for number in section.place.numbers))
        chosen = [self.axes.tensor(number) for number in numbers]
        alone = {axis for section in every for axis in section.place.axes}
        varying = [section.tensor for t, extent in varies.items() if extent.rows for section in sections[t]]
        layout = RowLayout.of(self.axes, [*varying, *chosen], alone)
        plain = {w.tensor for w in values.stores if not w.amax and w.scales_of is None}
        views: dict[TensorId, View] = {}
        for t, extent in varies.items():
            found = [layout.part(section, extent, numbers) for section in sections[t]]
            fault = next((part for part in found if isinstance(part, No)), None) or _type_fault(found)
            if fault is not None:
                return fault
            narrow = any(section.unit == COLUMNS and not self._is_wide(section.tensor) for section in sections[t])
            if t in plain and extent.columns and narrow:
                return No(f"{self.graph.tensors[t]} has fewer columns than the values that are written to it")
            views[t] = joined(found)
        program = RowProgram(
            inputs=tuple(views[t] for t in values.loaded),
            steps=tuple(values.steps),
            stores=_together([_store(views, written) for written in values.stores], layout.extents),
            sums=tuple(ColumnSum(views[t], factors) for t, factors in values.sums),
            indices=tuple(layout.view(tensor, Extent(True, False)) for tensor in chosen),
        )
        added = {number: t for t, number in values.loaded.items() if isinstance(views[t].place, OfRank)}
        if len({(group.rank, group.size) for group in program.groups}) > 1 or len(program.groups) > MOST_TABLES:
            names = ", ".join(repr(self.graph.tensors[group.table].name) for group in program.groups)
            return No(f"{names} are tables of ranks; accepted: up to {MOST_TABLES}, of one rank among as many")
        return layout.extents, over_ranks(program, {k: values.rounding(t) for k, t in added.items()})

    def _above(self, tensor: TensorId | None) -> Iterator[TensorId]:
        """`tensor`, and all tensors of matched nodes that it depends on."""
        if tensor is None:
            return
        yield tensor
        made_by = self.matched.made_by(tensor)
        for _, t in made_by.inputs if made_by is not None else ():
            yield from self._above(t)

    def _sections(self, t: TensorId) -> tuple[Section, ...]:
        if t not in self.values.loaded:
            value = self.values.values.get(t)
            share = self.axes.shared(t)
            of_parts = share and value is not None and self._has_columns()(value)
            section = Section(self.axes.tensor(t), unit=EachPart(share) if of_parts else COLUMNS)
            return (self.matched.written(t, section),)
        period = self.axes.repeated(t)
        unit = self.values.paired.get(t, EachColumnOfPart(period) if period else COLUMNS)
        return tuple(replace(p, unit=unit, tensor=self.axes.in_row_axes(p.tensor)) for p in self.matched.read(t))

    def _is_plain(self, o: Load) -> bool:
        sections = self._sections(list(self.values.loaded)[o.index])
        return [(section.place, section.unit) for section in sections] == [(ROWS, COLUMNS)]

    def _has_columns(self) -> Callable[[Operand], bool]:
        """Function that returns whether a value varies along a row."""
        extents = self._extents()
        return lambda o: extents.of(o).columns

    def _extents(self) -> Extents:
        """Extents of the steps' values, from the shapes of tensors."""
        return Extents(tuple(self._varies(t) for t in self.values.loaded), tuple(self.values.steps))

    def _varying(self) -> dict[TensorId, Extent]:
        """The tensors in memory, in the order of their views, with their extents."""
        values, extents = self.values, self._extents()
        found = {t: extents.inputs[number] for t, number in values.loaded.items()}
        for t in (w.tensor for w in values.stores):
            found[t] = self._varies(t)
            if isinstance(values.values.get(t), Chain):
                found[t] = replace(found[t], columns=extents.of(values.values[t]).columns)
        scales = (w.tensor if w.scales_of else w.block_scale for w in values.stores if w.block_size)
        found |= dict.fromkeys(scales, Extent(True, True))
        return found | dict.fromkeys((t for t, _ in values.sums), Extent(False, True))

    def _is_wide(self, tensor: FrozenTensor) -> bool:
        """True if a tensor, as ``Axes.in_row_axes`` returns it, has all columns."""
        return all(tensor.dim[axis] == self.axes.dim[axis] for axis in self.axes.columns)

    def _varies(self, t: TensorId) -> Extent:
        """Extent of a tensor in memory."""
        if t not in self.in_memory:
            self.in_memory[t] = self._extent(t)
        return self.in_memory[t]

    def _extent(self, t: TensorId) -> Extent:
        """Extent of a tensor in memory. A match of one row is treated like many rows: only weight and bias are known to
        be the same for all."""
        dim, axes = self.axes.tensor(t).dim, self.axes
        wide = self._is_wide(axes.tensor(t)) or axes.repeated(t) > 0
        if t in self.values.paired or t in self.values.moved:
            return Extent(True, wide or t in self.values.paired)
        rows, all_rows = ([e[axis] for axis in axes.axes] for e in (dim, axes.dim))
        varies = any(e != 1 for e in rows) or (rows == all_rows and t not in self.of_columns)
        return Extent(varies, wide and t not in self.of_rows)


def _type_fault(parts: Sequence[View]) -> No | None:
    for part in parts:
        if part.dtype is not parts[0].dtype:
            return No(f"{part.name!r} is {part.dtype.name}, joined to {parts[0].name!r}: {parts[0].dtype.name}")
    return None


def _store(views: dict[TensorId, View], w: Written) -> Store:
    scale = None if w.block_scale is None else views[w.block_scale]
    return Store(views[w.tensor], w.value, w.block_size, scale, w.amax, w.scales_of)


def _together(stores: Sequence[Store], extents: tuple[int, ...]) -> tuple[Store, ...]:
    """The stores, with those merged into one that together write all rows of a value."""
    groups: list[list[Store]] = []
    for store in stores:
        if groups and _follows(groups[-1][-1], store):
            groups[-1].append(store)
        else:
            groups.append([store])
    for first, *_, last in (group for group in groups if len(group) > 1):
        axis, begin, _ = first.view.place.span
        if (begin, last.view.place.span[2]) != (0, extents[axis]):
            return tuple(stores)
    return tuple(replace(group[0], view=joined([store.view for store in group])) for group in groups)


def _follows(before: Store, store: Store) -> bool:
    """True if a store writes the rows of a value that follow those of the store before it."""
    one, two = before.view.place, store.view.place
    if not one.span or not two.span or one.numbers or two.numbers:
        return False
    (axis, _, end), (its, first, _) = one.span, two.span
    alike = (before.value, before.view.dtype) == (store.value, store.view.dtype)
    return alike and (axis, end) == (its, first)
