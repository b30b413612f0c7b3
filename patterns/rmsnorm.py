"""RMS normalization with all that stands before and after it on the same rows: pointwise nodes, the largest
magnitude of a row or of all, quantization in blocks. Any value on the way may be an output."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphfuse.dtypes import data_type
from graphfuse.engine import No
from graphfuse.enums import reduction_mode, tensor_reordering
from graphfuse.ir import Graph, Node, Tensor, TensorId
from graphfuse.match import Match, Pattern, PatternGraph, convex
from graphfuse.ops import quantize_axis
from graphfuse.pointwise import Chain, Load, Operand, Scalar, Step
from graphfuse.rowwise import AMAX, INVERSE_RMS, NORMALIZE, RowProgram, Store, View

_ENDS = ("block_scale_quantize", "reduction")


@dataclass(frozen=True)
class RmsNormFacts:
    """Everything an engine may look at.

    node: the normalization's name, for messages. row_extents: of the row axes, outermost first,
    neighbours joined where one stride serves both in every tensor; at least one. columns: extent.
    input: the value that is normalized. program: what is computed and written.
    """

    node: str
    row_extents: tuple[int, ...]
    columns: int
    input: Operand
    program: RowProgram

    @property
    def rows(self) -> int:
        return math.prod(self.row_extents)


def template(g: PatternGraph):
    y, inverse_rms = norm(g)
    return {"output": y, "inverse_rms": inverse_rms}


def norm(g: PatternGraph):
    """The normalization that every pattern of this family has."""
    return g.rmsnorm(
        input=g.capture("input"),
        scale=g.capture("scale", optional=True),
        epsilon=g.capture("epsilon"),
        bias=g.capture("bias", optional=True),
    )


def grow(match: Match) -> Iterator[frozenset[int]]:
    """All around the normalization that works on its rows; without what comes before; without what comes after.
    What stands between two normalizations belongs to the first: what the second reads is in memory anyway."""
    graph, rows = match.graph, _Rows.of(match)
    core = frozenset(match.subgraph.node_ids)
    center = match.node("rmsnorm")
    before = graph.above([center.input("input")])
    after = graph.below(t for _, t in center.outputs)
    others = (graph.nodes[i] for i in before if graph.nodes[i].op_name == center.op_name)
    theirs = before & graph.below(t for node in others for _, t in node.outputs)
    for excluded in (theirs, before, after | theirs):
        yield convex(graph, core, lambda i, inside, out=excluded: i not in out and rows.takes(i, inside))
    yield core


@dataclass(frozen=True)
class _Rows:
    """Which axes of the normalized tensor are rows and which are columns."""

    graph: Graph
    dim: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, match: Match) -> "_Rows":
        x = match.graph.tensors[match.tensors["input"]]
        scale = match.tensors.get("scale")
        if scale is None:
            return cls(match.graph, x.dim, (len(x.dim) - 1,))
        extents = match.graph.tensors[scale].dim
        return cls(match.graph, x.dim, tuple(axis for axis, extent in enumerate(extents) if extent != 1))

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
        if any(
            graph.producer.get(t) in inside and self._is_end(graph.nodes[graph.producer[t]]) for _, t in node.inputs
        ):
            return False
        if node.op_name in _ENDS:
            return self._ends(node) and graph.tensors[node.input("input")].dim == self.dim
        if not node.op.pointwise or not self._fits(node.output("output")):
            return False
        output = graph.tensors[node.output("output")]
        # What is the same for all rows can be worked out by each of them, but not written by one.
        varies = any(output.dim[axis] != 1 for axis in self.axes) or math.prod(self.dim[a] for a in self.axes) == 1
        readers = set(graph.consumers.get(output.id, ()))
        return varies or (output.virtual and readers <= inside)

    def _fits(self, t: TensorId) -> bool:
        """Whether a tensor broadcasts to the rows: along all columns or none."""
        dim = self.graph.tensors[t].dim
        if len(dim) != len(self.dim) or any(e not in (1, x) for e, x in zip(dim, self.dim, strict=True)):
            return False
        return len({dim[axis] == self.dim[axis] for axis in self.columns if self.dim[axis] != 1}) <= 1

    def _ends(self, node: Node) -> bool:
        if node.op_name == "block_scale_quantize":
            return True
        if node.attribute("mode") is not reduction_mode.AMAX:
            return False
        dim = self.graph.tensors[node.output("output")].dim
        return all(e == 1 for e in dim) or dim == self.per_row

    def _is_end(self, node: Node) -> bool:
        """Whether what a node makes is not known before all rows are done, or only in its quantized form."""
        if node.op_name == "reduction":
            return self.graph.tensors[node.output("output")].dim != self.per_row
        return node.op_name in _ENDS

    @property
    def per_row(self) -> tuple[int, ...]:
        return tuple(1 if axis in self.columns else extent for axis, extent in enumerate(self.dim))


def facts(match: Match) -> RmsNormFacts | No:
    """What the match computes, as rows x columns; No if a tensor cannot be seen that way."""
    return _Facts(match).made()


class _Facts:
    """Makes the facts of one match: a value for each tensor, a view for each that lies in memory."""

    def __init__(self, match: Match):
        self.graph, self.subgraph = match.graph, match.subgraph
        self.rows = _Rows.of(match)
        self.center = match.node("rmsnorm")
        self.steps: list[Step] = []
        self.values: dict[TensorId, Operand] = {}
        self.loaded: dict[TensorId, int] = {}
        self.stores: list[tuple[TensorId, Chain, Node | None]] = []
        self.weights = {t for port in ("scale", "bias") for t in self._above(self.center.input(port))}

    def made(self) -> RmsNormFacts | No:
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
        loads = [self.graph.tensors[t] for t in self.loaded]
        by_value = next((t for t in loads if t.by_value), None)
        if by_value:
            return No(f"{by_value} is passed by value; accepted where it varies over columns: a tensor in memory")
        viewed = [*self.loaded, *(t for t, _, _ in self.stores)]
        ends = [end.output("scale") for _, _, end in self.stores if end is not None and end.op_name != "reduction"]
        layout = _Layout.of(self.graph, self.rows, [*viewed, *ends])
        views = {t: layout.view(self.graph.tensors[t], *self._varies(t)) for t in viewed}
        views |= {t: layout.view(self.graph.tensors[t], rows=True, columns=True) for t in ends}
        for found in views.values():
            if isinstance(found, No):
                return found
        return RmsNormFacts(
            node=self.center.name,
            row_extents=layout.extents,
            columns=self.rows.width,
            input=self.normalized,
            program=RowProgram(
                inputs=tuple(views[t] for t in self.loaded),
                steps=tuple(self.steps),
                stores=tuple(self._store(views, *stored) for stored in self.stores),
            ),
        )

    def _above(self, tensor: TensorId | None) -> Iterator[TensorId]:
        """`tensor` and all within the match that it is made from."""
        if tensor is None:
            return
        yield tensor
        made_by = self.graph.producer.get(tensor)
        if made_by in self.subgraph.node_ids:
            for _, t in self.graph.nodes[made_by].inputs:
                yield from self._above(t)

    def _varies(self, t: TensorId) -> tuple[bool, bool]:
        """Whether a tensor in memory varies over rows and over columns. One row is as good as many: only
        weight and bias are known to be the same for all of them."""
        dim = self.graph.tensors[t].dim
        rows, all_rows = ([e[axis] for axis in self.rows.axes] for e in (dim, self.rows.dim))
        varies = any(e != 1 for e in rows) or (rows == all_rows and t not in self.weights)
        if t in self.values and isinstance(self.values[t], Chain):
            return varies, self.row_program.shapes[self.values[t].index].columns
        wide = all(dim[axis] == self.rows.dim[axis] for axis in self.rows.columns)
        return varies, wide

    @property
    def row_program(self) -> RowProgram:
        """The steps, with inputs of which only the shape is known."""
        inputs = tuple(View(t, "", data_type.FLOAT, (), 1, 1, *self._varies(t)) for t in self.loaded)
        return RowProgram(inputs, tuple(self.steps), ())

    def _operand(self, t: TensorId, in_memory: bool = False) -> Operand:
        if t not in self.values:
            tensor = self.graph.tensors[t]
            # Of one row of one column all tensors have one element, and are rows as they are elsewhere.
            if tensor.elements == 1 and not in_memory and (tensor.by_value or math.prod(self.rows.dim) != 1):
                return Scalar.of(tensor)
            self.values[t] = Load(self.loaded.setdefault(t, len(self.loaded)))
        return self.values[t]

    def _chain(self, t: TensorId) -> Chain:
        value = self._operand(t, in_memory=True)
        return value if isinstance(value, Chain) else self._step(Step("identity", (("input", value),)))

    def _step(self, step: Step) -> Chain:
        self.steps.append(step)
        return Chain(len(self.steps) - 1)

    def _rounded(self, t: TensorId | None) -> data_type | None:
        """What a value is rounded to for those in the match who read it: a stored one, and one whose type is
        not what its node computes in."""
        if t is None or not set(self.graph.consumers.get(t, ())) & set(self.subgraph.node_ids):
            return None
        dtype = self.graph.tensors[t].dtype
        return None if dtype is data_type.FLOAT else dtype

    def _node(self, node: Node) -> None:
        if node.op_name == "rmsnorm":
            self._norm(node)
        elif node.op_name == "block_scale_quantize":
            self.stores.append((node.output("Y"), self._chain(node.input("input")), node))
            return
        elif node.op_name == "reduction":
            output = node.output("output")
            if self.graph.tensors[output].dim != self.rows.per_row:
                self.stores.append((output, self._chain(node.input("input")), node))
                return
            operand = self._operand(node.input("input"), in_memory=True)
            self.values[output] = self._step(Step(AMAX, (("input", operand),), (), self._rounded(output)))
        else:
            operands = tuple((port, self._operand(t)) for port, t in node.inputs)
            output = node.output("output")
            step = Step(node.op_name, operands, node.attributes, self._rounded(output))
            self.values[output] = self._step(step)
        written = self.subgraph.outputs
        self.stores += [(t, self.values[t], None) for _, t in node.outputs if t in written]

    def _norm(self, node: Node) -> None:
        self.normalized = self._operand(node.input("input"), in_memory=True)
        epsilon = self.values.get(t := node.input("epsilon"), Scalar.of(self.graph.tensors[t]))
        inverse = self._step(Step(INVERSE_RMS, (("input", self.normalized), ("epsilon", epsilon))))
        inverse_rms = node.output("inv_variance")
        rounded = self._rounded(inverse_rms)
        if inverse_rms is not None:
            # Who reads it gets it rounded; the normalization itself does not.
            copy = Step("identity", (("input", inverse),), (), rounded)
            self.values[inverse_rms] = self._step(copy) if rounded else inverse
        operands = (("input", self.normalized), ("inverse", inverse))
        for port in ("scale", "bias"):
            if node.input(port) is not None:
                operands += ((port, self._operand(node.input(port), in_memory=True)),)
        y = node.output("Y")
        self.values[y] = self._step(Step(NORMALIZE, operands, (), self._rounded(y)))

    def _store(self, views: Mapping[TensorId, View], t: TensorId, value: Chain, end: Node | None) -> Store:
        if end is None:
            return Store(views[t], value)
        if end.op_name == "reduction":
            return Store(views[t], value, amax=True)
        return Store(views[t], value, end.attribute("block_size"), views[end.output("scale")])


@dataclass(frozen=True)
class _Layout:
    """How tensors are seen as rows x columns. groups: the axes that each row axis joins."""

    rows: _Rows
    extents: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph, rows: _Rows, tensors: list[TensorId]) -> "_Layout":
        """Row axes joined wherever one stride serves both in every tensor."""
        if 0 in rows.dim:
            return cls(rows, (0,), ((),))
        strides = [_row_strides(graph.tensors[t]) for t in tensors]
        groups: list[list[int]] = []
        for axis in rows.axes:
            if rows.dim[axis] == 1:
                continue
            last = groups[-1][-1] if groups else None
            if last is not None and all(s[last] == rows.dim[axis] * s[axis] for s in strides):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if not groups:
            return cls(rows, (1,), ((),))
        extents = tuple(math.prod(rows.dim[axis] for axis in group) for group in groups)
        return cls(rows, extents, tuple(map(tuple, groups)))

    def view(self, tensor: Tensor, rows: bool, columns: bool) -> View | No:
        packed = merge((tensor.dim[a], tensor.stride[a]) for a in self.rows.columns)
        if len(packed) > 1:
            axes = list(self.rows.columns)
            return No(f"{tensor}: the normalized axes {axes} are not one run of elements with one stride")
        width, column_stride = packed[0] if packed else (1, 1)
        swizzled = tensor.reordering is tensor_reordering.F8_128x4
        if swizzled and len(self.rows.columns) > 1:
            axes = list(self.rows.columns)
            return No(
                f"{tensor}: accepted where one axis is normalized, as its rows are all axes but the last; got {axes}"
            )
        strides = _row_strides(tensor)
        if self.groups == ((),):
            # One row keeps the stride it declares, so that it is planned like any number of them.
            declared = [tensor.stride[axis] for axis in self.rows.axes]
            row_strides = (declared[0] if rows and declared and declared[0] >= width else 0,)
        else:
            row_strides = tuple(strides[group[-1]] for group in self.groups)
        return View(
            tensor.id,
            tensor.name,
            tensor.dtype,
            row_strides,
            column_stride,
            tensor.alignment,
            rows,
            columns,
            swizzled,
        )


def _row_strides(tensor: Tensor) -> tuple[int, ...]:
    """By axis, 0 where the tensor does not vary."""
    return tuple(0 if extent == 1 else stride for extent, stride in zip(tensor.dim, tensor.stride, strict=True))


def merge(axes) -> tuple[tuple[int, int], ...]:
    """(extent, stride) pairs, outermost first, with neighbours joined where one stride serves
    both and extents of 1 left out."""
    merged: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    return tuple(merged)


PATTERN = Pattern("rmsnorm", template, facts, grow)
