"""Roles of nodes that move rows: they determine where the rows lie that other nodes read or write.

They compute nothing, except that reads from several ranks are summed. `all_gather` is a write to the memory of each
rank.
"""

from collections.abc import Mapping

from graphfuse.op_graph.ir import Node, TensorId
from graphfuse.ops.collectives import ranks_of
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.role import PartialMatch, Role
from graphfuse.patterns.sections import Section
from graphfuse.patterns.values import Values
from graphfuse.rows.views import RankGroup

_NOT_WRITTEN = "is given no whole rows that they write"


class Move(Role):
    """A move of rows from memory to the nodes that read them. Its output is not written."""

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        made, graph = node.output("output"), matched.graph
        readers = matched.readers(made)
        if not readers or any(matched.made_by(t) for _, t in node.inputs):
            return "moves what they write: a kernel reads moved rows, and writes them where a node after it says"
        if not matched.kept(made):
            return f"makes {graph.tensors[made]}, which is written, or others read it"
        regular = self.is_regular(matched.axes, node)
        other = next((n for n in readers if not matched.role(n).accepts(n, made, self, regular)), None)
        if other is not None or not self.suits(matched.axes, node):
            return f"makes {graph.tensors[made]}, which {other or 'the kernel'} does not read as {matched.axes}"
        return None

    def suits(self, axes: Axes, node: Node) -> bool:
        """True if the readers of the moved rows can use them."""
        return True


class Joining(Move):
    """A join of tensors along an axis of rows."""

    def suits(self, axes: Axes, node: Node) -> bool:
        made, axis = node.output("output"), _joined_axis(axes, node)
        if not all(axes.has_rows(node.input(port)) for port in ("a", "b")):
            return False
        return axes.fits(made) and axis in axes.axes and axes.tensor(made).dim[axis] == axes.dim[axis]

    def read(self, matched: PartialMatch, node: Node) -> tuple[Section, ...]:
        a, b = (Section(matched.axes.tensor(node.input(port))) for port in ("a", "b"))
        axis = _joined_axis(matched.axes, node)
        cut, end = a.tensor.dim[axis], matched.axes.dim[axis]
        return a.within(axis, 0, cut, end), b.within(axis, cut, end, end)


def _joined_axis(axes: Axes, node: Node) -> int:
    return node.attribute("axis") + max(len(axes.dim) - len(axes.graph.tensors[node.output("output")].dim), 0)


class AddingRanks(Move):
    """A sum over ranks of the rows in the memory of each."""

    def suits(self, axes: Axes, node: Node) -> bool:
        return axes.whole(node.output("output")) and not axes.sums

    def read(self, matched: PartialMatch, node: Node) -> tuple[Section, ...]:
        return (Section(matched.axes.tensor(node.input("input"))).of_ranks(_group(matched, node)),)


def _group(matched: PartialMatch, node: Node) -> RankGroup:
    table = matched.graph.tensors[node.input("peers")]
    return RankGroup(table.id, node.attribute("rank"), ranks_of(table.dim[-1]))


class GatheringRanks(Role):
    """A gather of rows: each rank writes its rows to the memory of all ranks."""

    starts = alone = final = True

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        x, axes = node.input("input"), matched.axes
        if matched.made_by(x) is None or matched.made_by(node.input("peers")) is not None or axes.sums:
            return _NOT_WRITTEN
        fit = axes.whole(x) and not matched.ended(x) and not matched.readers(node.output("output"))
        return None if fit else _NOT_WRITTEN

    def written(self, matched: PartialMatch, node: Node, section: Section) -> Section:
        return matched.written(node.input("input"), section.of_ranks(_group(matched, node)))

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        values.move(node.output("output"), node.input("input"))


class Gathering(Move):
    """A gather of rows of cosines and sines by number."""

    narrows = True

    def is_regular(self, axes: Axes, node: Node) -> bool:
        return False

    def accepts(self, node: Node, t: TensorId, move: Role, regular: bool) -> bool:
        return isinstance(move, Slicing) and t == node.input("input")

    def read(self, matched: PartialMatch, node: Node) -> tuple[Section, ...]:
        (section,) = matched.read(node.input("input"))
        return (section.chosen(matched.graph.tensors[node.input("index")]),)


class Slicing(Move):
    """A slice of a tensor in memory that matched nodes read, or a slice of computed rows that is written."""

    narrows = final = True

    def is_regular(self, axes: Axes, node: Node) -> bool:
        made = node.output("output")
        # One element would be read as a scalar, at the beginning of the whole tensor instead of the slice.
        return axes.whole(made) or axes.fits(made) and axes.graph.tensors[made].elements > 1

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        if matched.made_by(node.input("input")) is None:
            return super().why_not(matched, node)
        written = all(isinstance(matched.role(n), Scattering) for n in matched.readers(node.output("output")))
        axes, fit = matched.axes, written and not matched.ended(node.input("input"))
        fit = fit and self.cut(axes, node) is not None and axes.has_rows(node.output("output"))
        return None if fit else "is no slice along one axis of rows that they write"

    def cut(self, axes: Axes, node: Node) -> tuple[int, int, int] | None:
        """Axis, first and end of a slice of rows, or of values of one per row, along one row axis; else None."""
        x, slices = node.input("input"), node.attribute("slices")
        dim = axes.graph.tensors[x].dim
        cut = [(axis, *s) for axis, s in enumerate(slices) if s != (0, dim[axis], 1)]
        if not (dim == axes.per_row or axes.has_all(x)) or len(cut) != 1:
            return None
        ((axis, first, end, step),) = cut
        return (axis, first, end) if axis in axes.axes and step == 1 and first < end else None

    def read(self, matched: PartialMatch, node: Node) -> tuple[Section, ...]:
        (section,) = matched.read(node.input("input"))
        starts, _, steps = zip(*node.attribute("slices"), strict=True)
        return (section.sliced(matched.graph.tensors[node.output("output")].dim, starts, steps),)

    def written(self, matched: PartialMatch, node: Node, section: Section) -> Section:
        axis, first, end = self.cut(matched.axes, node)
        return section.within(axis, first, end, matched.axes.dim[axis])

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        values.move(node.output("output"), node.input("input"))


class Scattering(Role):
    """A scatter: computed rows, all or a slice, are written to rows chosen by number."""

    starts = alone = final = True

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        x, axes = node.input("input"), matched.axes
        made_by = matched.made_by(x)
        if made_by is None or matched.made_by(node.input("index")) is not None or not axes.last:
            return _NOT_WRITTEN
        if not axes.has_rows(node.output("output")):
            return _NOT_WRITTEN
        role = matched.role(made_by)
        sliced = isinstance(role, Slicing) and role.cut(axes, made_by) is not None
        return None if sliced or (axes.has_all(x) and not matched.ended(x)) else _NOT_WRITTEN

    def written(self, matched: PartialMatch, node: Node, section: Section) -> Section:
        return matched.written(node.input("input"), section.chosen(matched.graph.tensors[node.input("index")]))

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        x = node.input("input")
        made_by = matched.made_by(x)
        sliced = made_by is not None and isinstance(matched.role(made_by), Slicing)
        values.move(node.output("output"), made_by.input("input") if sliced else x)


MOVES: Mapping[str, Role] = {
    "all_gather": GatheringRanks(),
    "all_reduce": AddingRanks(),
    "gather_rows": Gathering(),
    "join": Joining(),
    "scatter_rows": Scattering(),
    "slice": Slicing(),
}
