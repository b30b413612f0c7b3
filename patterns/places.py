"""Where in memory the rows of a match lie: in one tensor or several, one after another or chosen by number."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphfuse.ir import Node, Subgraph, Tensor, TensorId
from graphfuse.patterns.axes import Axes
from graphfuse.rows.pairs import EachPair, Pairs


@dataclass(frozen=True)
class Place:
    """A tensor that has rows of a match, with its strides along the match's axes.

    within: axis, first and end of the rows that it has, None for all. numbers: the tensor of the numbers of its rows,
    None where row after row is its. apart, count: of those rows. offset: elements from the tensor's first. of_pairs: as
    of ``View``.
    """

    tensor: Tensor
    within: tuple[int, int, int] | None = None
    numbers: Tensor | None = None
    apart: int = 0
    count: int = 0
    offset: int = 0
    of_pairs: EachPair | None = None


@dataclass(frozen=True)
class Places:
    """Those of one match."""

    rows: Axes
    subgraph: Subgraph

    def of_input(self, t: TensorId) -> tuple[Place, ...]:
        """Of a tensor that is read: one after another, where nodes of the match join several."""
        return tuple(self._joined(t, 0))

    def _joined(self, t: TensorId, first: int) -> Iterator[Place]:
        node = self.made_by(t)
        if node is None or node.op_name != "join":
            yield Place(self.rows.tensor(t))
            return
        axis = node.attribute("axis") + len(self.rows.dim) - len(self.rows.graph.tensors[t].dim)
        for port in ("a", "b"):
            part = node.input(port)
            extent = self.rows.tensor(part).dim[axis]
            for place in self._joined(part, first):
                within = place.within or (axis, first, first + extent)
                yield replace(place, tensor=self._as_wide(place.tensor, axis), within=within)
            first += extent

    def of_output(self, t: TensorId) -> Place:
        """Of a tensor that is written."""
        node, place = self.made_by(t), Place(self.rows.tensor(t))
        if node is not None and node.op_name == "scatter_rows":
            place = _chosen(place, self.rows.graph.tensors[node.input("index")])
            node = self.made_by(node.input("input"))
        cut = self.rows.cut(node) if node is not None else None
        if cut is None:
            return place
        return replace(place, tensor=self._as_wide(place.tensor, cut[0]), within=cut)

    def of_angles(self, t: TensorId, pairs: Pairs, otherwise: float) -> Place:
        """Of cosines, or sines, of which there is one for each pair of columns."""
        numbers, node = None, self.made_by(t)
        if node is not None and node.op_name == "gather_rows":
            numbers, t = self.rows.graph.tensors[node.input("index")], node.input("input")
            node = self.made_by(t)
        offset = 0
        if node is not None:  # a slice
            t = node.input("input")
            starts = [first for first, _, _ in node.attribute("slices")]
            offset = sum(a * s for a, s in zip(starts, self.rows.graph.tensors[t].stride, strict=True))
        found = self.rows.graph.tensors[t]
        steps = [step for _, _, step in node.attribute("slices")] if node is not None else [1] * len(found.dim)
        extents = self.rows.graph.tensors[node.output("output")].dim if node is not None else found.dim
        found = replace(found, dim=extents, stride=tuple(a * s for a, s in zip(found.stride, steps, strict=True)))
        place = Place(found, offset=offset, of_pairs=EachPair(pairs, otherwise))
        return place if numbers is None else _chosen(place, numbers)

    def made_by(self, t: TensorId) -> Node | None:
        """The node of the match that makes a tensor."""
        made_by = self.rows.graph.producer.get(t)
        return self.rows.graph.nodes[made_by] if made_by in self.subgraph.node_ids else None

    def _as_wide(self, tensor: Tensor, axis: int) -> Tensor:
        """A tensor with some rows along an axis as one with all of them, so that its stride counts."""
        dim = list(tensor.dim)
        dim[axis] = self.rows.dim[axis]
        return replace(tensor, dim=tuple(dim))


def _chosen(place: Place, numbers: Tensor) -> Place:
    """A place whose rows, along the first axis, are chosen by number."""
    (count, *dim), (apart, *stride) = place.tensor.dim, place.tensor.stride
    first = replace(place.tensor, dim=(1, *dim), stride=(0, *stride))
    return replace(place, tensor=first, numbers=numbers, apart=apart, count=count)
