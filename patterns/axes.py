"""Which axes are rows and which are columns, and which nodes work on rows."""

import math
from dataclasses import dataclass, replace

from graphfuse.dtypes import data_type
from graphfuse.enums import reduction_mode
from graphfuse.ir import Graph, Node, Tensor, TensorId
from graphfuse.match import Match
from graphfuse.ops import EXPANSIONS, REDUCTIONS, aligned

ENDS = ("block_scale_quantize", "reduction")
PLACES = frozenset({"gather_rows", "join", "scatter_rows", "slice"})
"""Ops that say where rows lie: they are no steps."""
MOST_NORMS = 4
"""That one kernel has one after another. Each is a phase more, in which rows that have no room in registers are read
again, with all that was added to them on the way."""


@dataclass(frozen=True)
class Axes:
    """Which axes of the normalized tensor are rows and which are columns. ends: ops that may join although what they
    make is not pointwise."""

    graph: Graph
    dim: tuple[int, ...]
    columns: tuple[int, ...]
    ends: tuple[str, ...]

    @classmethod
    def of(cls, match: Match) -> "Axes | None":
        """Those of the match's anchor; None where it is no reduction of rows."""
        return cls.around(match.graph, match.anchor)

    @classmethod
    def around(cls, graph: Graph, center: Node) -> "Axes | None":
        """Those of a node that reduces. Nothing ends beside sums over rows."""
        ends = () if any(port.over_rows for port in center.op.outputs) else ENDS
        shapes = {port: graph.tensors[t].dim for port, t in center.inputs}
        dim = shapes.get("input") or next(iter(shapes.values()))
        if center.op_name == "reduction":
            columns = _reduced(dim, center.attribute("axes"))
            known = columns and REDUCTIONS[center.attribute("mode")].in_rows
            return cls(graph, dim, columns, ends) if known else None
        if center.op_name == "block_scale_quantize":
            return cls(graph, dim, (center.attribute("axis"),), ends)
        if center.op_name in ("rotate_pairs", "scatter_rows"):
            return cls(graph, dim, (len(dim) - 1,), ends)
        return cls(graph, dim, EXPANSIONS[center.op_name].columns(shapes, dict(center.attributes)), ends)

    def tensor(self, t: TensorId) -> Tensor:
        """A tensor of the graph, one of lower rank with leading axes of extent 1."""
        found = self.graph.tensors[t]
        more = len(self.dim) - len(found.dim)
        if more <= 0:
            return found
        outer = found.dim[0] * found.stride[0]
        return replace(found, dim=aligned(found.dim, len(self.dim)), stride=(*(outer,) * more, *found.stride))

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.dim)) if axis not in self.columns)

    @property
    def width(self) -> int:
        return math.prod(self.dim[axis] for axis in self.columns)

    def takes(self, index: int, inside: frozenset[int]) -> bool:
        """Whether a node works on rows, so that it may join the nodes `inside`."""
        graph, node = self.graph, self.graph.nodes[index]
        if node.op_name in PLACES:
            return self._places(node, inside)
        if node.op_name == "rotate_pairs":
            return node.compute is data_type.FLOAT and self._rotates(node, inside)
        if node.compute is not data_type.FLOAT or not all(self._fits(t) for _, t in node.inputs):
            return False
        if any(graph.producer.get(t) in inside and self._is_end(t) for _, t in node.inputs):
            return False
        if any(inside & set(graph.consumers.get(t, ())) and self._is_end(t) for _, t in node.outputs):
            return False
        if node.op_name in self.ends:
            return self._ends(node) and graph.tensors[node.input("input")].dim == self.dim
        if node.op_name in EXPANSIONS:
            # Beside sums over rows nothing else is reduced.
            norms = sum(graph.nodes[i].op_name in EXPANSIONS for i in inside)
            return bool(self.ends) and norms < MOST_NORMS and Axes.around(graph, node) == self
        if not (node.op.pointwise or self._numbers_columns(node)) or not self._fits(node.output("output")):
            return False
        output = self.tensor(node.output("output"))
        # What is the same for all rows can be worked out by each of them, but not written by one.
        varies = any(output.dim[axis] != 1 for axis in self.axes) or math.prod(self.dim[a] for a in self.axes) == 1
        readers = set(graph.consumers.get(output.id, ()))
        return varies or (output.virtual and readers <= inside)

    def _rotates(self, node: Node, inside: frozenset[int]) -> bool:
        """Whether a node rotates pairs of rows' columns, by angles that no node inside makes."""
        x, angles = node.input("input"), {node.input("cos"), node.input("sin")}
        if self.columns != (len(self.dim) - 1,) or self.graph.tensors[x].dim != self.dim:
            return False
        made = [self.graph.nodes[p] for t in angles if (p := self.graph.producer.get(t)) in inside]
        ended = self.graph.producer.get(x) in inside and self._is_end(x)
        return not ended and all(n.op_name in ("gather_rows", "slice") for n in made)

    def _places(self, node: Node, inside: frozenset[int]) -> bool:
        """Whether a node says of what nodes inside read, or of rows that they make, where in memory it lies."""
        graph, made = self.graph, node.output("output")
        readers = [graph.nodes[i] for i in graph.consumers.get(made, ()) if i in inside]
        if node.op_name == "slice" and graph.producer.get(node.input("input")) in inside:
            stored = all(reader.op_name == "scatter_rows" for reader in readers)
            return stored and self.cut(node) is not None and not self._is_end(node.input("input"))
        if node.op_name == "scatter_rows":
            return self._scatters(node, inside)
        if not graph.tensors[made].virtual or not set(graph.consumers.get(made, ())) <= inside:
            return False
        if any(graph.producer.get(t) in inside for _, t in node.inputs):
            return False
        if node.op_name == "join":
            only = all(r.op_name == "join" or r.op_name not in PLACES for r in readers)
            return bool(readers) and only and self._fits(made) and node.attribute("axis") in self.axes
        return bool(readers) and all(self._are_angles(made, reader, node.op_name) for reader in readers)

    def _scatters(self, node: Node, inside: frozenset[int]) -> bool:
        """Whether a node writes rows that are made inside, all of them or a slice, where numbers say."""
        x, made_by = node.input("input"), self.graph.producer.get(node.input("input"))
        if made_by not in inside or self.graph.producer.get(node.input("index")) in inside:
            return False
        whole = self.graph.tensors[x].dim == self.dim and not self._is_end(x)
        return (whole or self.cut(self.graph.nodes[made_by]) is not None) and self.columns == (len(self.dim) - 1,)

    def _are_angles(self, t: TensorId, reader: Node, made_by: str) -> bool:
        """Whether a node reads a tensor as cosines or sines, or gathers these from it."""
        if reader.op_name == "rotate_pairs":
            return t in (reader.input("cos"), reader.input("sin")) and t != reader.input("input")
        return reader.op_name == "gather_rows" and made_by == "slice" and t == reader.input("input")

    def cut(self, node: Node) -> tuple[int, int, int] | None:
        """Of a slice along one axis of rows, or of what is one a row, that axis, the first and the end; None for other
        slices and nodes."""
        if node.op_name != "slice":
            return None
        dim, slices = self.graph.tensors[node.input("input")].dim, node.attribute("slices")
        axes = [axis for axis, s in enumerate(slices) if s != (0, dim[axis], 1)]
        if dim not in (self.dim, self.per_row) or len(axes) != 1 or axes[0] not in self.axes or slices[axes[0]][2] != 1:
            return None
        first, end, _ = slices[axes[0]]
        return (axes[0], first, end) if first < end else None

    def _numbers_columns(self, node: Node) -> bool:
        """Whether a node makes of each element the number of its column."""
        if node.op_name != "gen_index":
            return False
        axis = node.attribute("axis") - len(self.graph.tensors[node.input("input")].dim) + len(self.dim)
        return self.columns == (axis,)

    def reduces(self, index: int) -> bool:
        """Whether a node makes one value of each row."""
        node = self.graph.nodes[index]
        if node.op_name in EXPANSIONS:
            return True
        return node.op_name == "reduction" and self.graph.tensors[node.output("output")].dim == self.per_row

    def _fits(self, t: TensorId) -> bool:
        """Whether a tensor broadcasts to the rows: along all columns or none."""
        dim = self.tensor(t).dim
        if len(dim) != len(self.dim) or any(e not in (1, x) for e, x in zip(dim, self.dim, strict=True)):
            return False
        return len({dim[axis] == self.dim[axis] for axis in self.columns if self.dim[axis] != 1}) <= 1

    def _ends(self, node: Node) -> bool:
        if node.op_name == "block_scale_quantize":
            return True
        dim, mode = self.graph.tensors[node.output("output")].dim, node.attribute("mode")
        if dim == self.per_row:
            return REDUCTIONS[mode].in_rows
        return mode is reduction_mode.AMAX and all(e == 1 for e in dim)

    def _is_end(self, t: TensorId) -> bool:
        """Whether what was made inside is not known before all rows are done, or only in its quantized form."""
        node = self.graph.nodes[self.graph.producer[t]]
        if node.op_name == "reduction":
            return self.graph.tensors[t].dim != self.per_row
        if any(port.over_rows and node.output(port.name) == t for port in node.op.outputs):
            return True
        return node.op_name in (*ENDS, "scatter_rows", "slice")

    @property
    def per_row(self) -> tuple[int, ...]:
        return tuple(1 if axis in self.columns else extent for axis, extent in enumerate(self.dim))


def _reduced(dim: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The columns of a tensor that is reduced along axes; None if it is all one number is made of, of several axes, or
    if there are none. Axes of extent 1 are rows, but for the last, where there are no others."""
    columns = tuple(axis for axis in axes if dim[axis] != 1) or axes[-1:]
    rows = [axis for axis, extent in enumerate(dim) if axis not in columns and extent != 1]
    return columns if (rows or len(columns) == 1) and all(dim[axis] for axis in columns) else None
