"""Which axes are rows and which are columns, and which nodes work on rows."""

import math
from dataclasses import dataclass, replace

from graphfuse.dtypes import data_type
from graphfuse.enums import reduction_mode
from graphfuse.ir import Graph, Node, Tensor, TensorId
from graphfuse.match import Match
from graphfuse.ops import aligned
from graphfuse.rows.expansions import EXPANSIONS, REDUCED

ENDS = ("block_scale_quantize", "reduction")
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
            known = columns and center.attribute("mode") in REDUCED
            return cls(graph, dim, columns, ends) if known else None
        if center.op_name == "block_scale_quantize":
            return cls(graph, dim, (center.attribute("axis"),), ends)
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
            return mode in REDUCED
        return mode is reduction_mode.AMAX and all(e == 1 for e in dim)

    def _is_end(self, t: TensorId) -> bool:
        """Whether what was made inside is not known before all rows are done, or only in its quantized form."""
        node = self.graph.nodes[self.graph.producer[t]]
        if node.op_name == "reduction":
            return self.graph.tensors[t].dim != self.per_row
        if any(port.over_rows and node.output(port.name) == t for port in node.op.outputs):
            return True
        return node.op_name in ENDS

    @property
    def per_row(self) -> tuple[int, ...]:
        return tuple(1 if axis in self.columns else extent for axis, extent in enumerate(self.dim))


def _reduced(dim: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The columns of a tensor that is reduced along axes; None if it is all one number is made of, of several axes, or
    if there are none. Axes of extent 1 are rows, but for the last, where there are no others."""
    columns = tuple(axis for axis in axes if dim[axis] != 1) or axes[-1:]
    rows = [axis for axis, extent in enumerate(dim) if axis not in columns and extent != 1]
    return columns if (rows or len(columns) == 1) and all(dim[axis] for axis in columns) else None
