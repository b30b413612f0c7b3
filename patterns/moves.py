"""Roles of nodes that move rows: they compute nothing, and say where rows lie that other nodes read or write."""

from collections.abc import Mapping

from graphfuse.ir import Node, TensorId
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.places import Piece
from graphfuse.patterns.role import Members, Role
from graphfuse.patterns.values import Values


class Move(Role):
    """A move of rows from memory to the nodes that read its output, which is not written."""

    def joins(self, members: Members, node: Node) -> bool:
        made = node.output("output")
        readers = members.readers(made)
        if not readers or not members.kept(made) or any(members.made_by(t) for _, t in node.inputs):
            return False
        accepted = (members.role(reader).accepts(reader, made, self) for reader in readers)
        return all(accepted) and self.suits(members.axes, node)

    def suits(self, axes: Axes, node: Node) -> bool:
        """Whether the rows are those of the match, or what readers take in their place."""
        return True


class Joining(Move):
    """Tensors joined to one along an axis of rows."""

    def suits(self, axes: Axes, node: Node) -> bool:
        made, axis = node.output("output"), _joined_axis(axes, node)
        return axes.fits(made) and axis in axes.axes and axes.tensor(made).dim[axis] == axes.dim[axis]

    def read(self, members: Members, node: Node) -> tuple[Piece, ...]:
        a, b = (Piece(members.axes.tensor(node.input(port))) for port in ("a", "b"))
        axis = _joined_axis(members.axes, node)
        cut, end = a.tensor.dim[axis], members.axes.dim[axis]
        return a.within(axis, 0, cut, end), b.within(axis, cut, end, end)


def _joined_axis(axes: Axes, node: Node) -> int:
    return node.attribute("axis") + len(axes.dim) - len(axes.graph.tensors[node.output("output")].dim)


class Gathering(Move):
    """Cosines and sines in rows that numbers choose."""

    regular = False

    def accepts(self, node: Node, t: TensorId, move: Role) -> bool:
        return isinstance(move, Slicing) and t == node.input("input")

    def read(self, members: Members, node: Node) -> tuple[Piece, ...]:
        (piece,) = members.read(node.input("input"))
        return (piece.chosen(members.graph.tensors[node.input("index")]),)


class Slicing(Move):
    """Cosines and sines that are a slice of a tensor; or rows of a value, some along one axis, that are written."""

    regular = False

    def joins(self, members: Members, node: Node) -> bool:
        if members.made_by(node.input("input")) is None:
            return super().joins(members, node)
        written = all(isinstance(members.role(n), Scattering) for n in members.readers(node.output("output")))
        return written and self.cut(members.axes, node) is not None and not members.ended(node.input("input"))

    def ends(self, axes: Axes, node: Node, t: TensorId) -> bool:
        return True

    def cut(self, axes: Axes, node: Node) -> tuple[int, int, int] | None:
        """Axis, first and end of a slice along one axis of rows, or of what is one a row; None for other slices."""
        dim, slices = axes.graph.tensors[node.input("input")].dim, node.attribute("slices")
        cut = [(axis, *s) for axis, s in enumerate(slices) if s != (0, dim[axis], 1)]
        if dim not in (axes.dim, axes.per_row) or len(cut) != 1:
            return None
        ((axis, first, end, step),) = cut
        return (axis, first, end) if axis in axes.axes and step == 1 and first < end else None

    def read(self, members: Members, node: Node) -> tuple[Piece, ...]:
        (piece,) = members.read(node.input("input"))
        starts, _, steps = zip(*node.attribute("slices"), strict=True)
        return (piece.sliced(members.graph.tensors[node.output("output")].dim, starts, steps),)

    def written(self, members: Members, node: Node, piece: Piece) -> Piece:
        axis, first, end = self.cut(members.axes, node)
        return piece.within(axis, first, end, members.axes.dim[axis])

    def compute(self, values: Values, members: Members, node: Node) -> None:
        values.move(node.output("output"), node.input("input"))


class Scattering(Role):
    """Rows of a value, all or a slice, that are written where numbers say."""

    starts = alone = True

    def joins(self, members: Members, node: Node) -> bool:
        x, axes = node.input("input"), members.axes
        made_by = members.made_by(x)
        if made_by is None or members.made_by(node.input("index")) is not None or not axes.last:
            return False
        role = members.role(made_by)
        sliced = isinstance(role, Slicing) and role.cut(axes, made_by) is not None
        return sliced or (axes.whole(x) and not members.ended(x))

    def ends(self, axes: Axes, node: Node, t: TensorId) -> bool:
        return True

    def written(self, members: Members, node: Node, piece: Piece) -> Piece:
        return members.written(node.input("input"), piece.chosen(members.graph.tensors[node.input("index")]))

    def compute(self, values: Values, members: Members, node: Node) -> None:
        x = node.input("input")
        made_by = members.made_by(x)
        sliced = made_by is not None and isinstance(members.role(made_by), Slicing)
        values.move(node.output("output"), made_by.input("input") if sliced else x)


MOVES: Mapping[str, Role] = {
    "gather_rows": Gathering(),
    "join": Joining(),
    "scatter_rows": Scattering(),
    "slice": Slicing(),
}
