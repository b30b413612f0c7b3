"""RMS normalization, with whatever single-consumer pointwise chain and quantization follow it."""

from dataclasses import dataclass

from graphfuse.dtypes import data_type
from graphfuse.engine import No
from graphfuse.enums import tensor_reordering
from graphfuse.ir import Tensor, TensorId
from graphfuse.match import Match, Pattern, PatternGraph
from graphfuse.ops import quantize_axis
from graphfuse.pointwise import Program, Scalar


@dataclass(frozen=True)
class View:
    """A tensor read or written as rows x columns, strides in elements.

    rows: (extent, stride) of the row axes, outermost first, merged where one stride
    serves both; a single row keeps the stride it declares, so that it is planned like
    any number of them, or has none if that is shorter than the row. column_stride: 1 for packed columns (also when
    there is one column). alignment: bytes that the address is a multiple of.
    """

    tensor: TensorId
    name: str
    dtype: data_type
    rows: tuple[tuple[int, int], ...]
    column_stride: int
    alignment: int

    @property
    def row_stride(self) -> int:
        """The one stride between rows; only for views with at most one row axis."""
        return self.rows[0][1] if self.rows else 0


@dataclass(frozen=True)
class RmsNormFacts:
    """Everything an engine may look at: Y = epilogue(input * inverse_rms * weight + bias), stored as output.

    node: names for messages. rows, columns: extents. weight and bias: one row each.
    epilogue: pointwise program per element. inverse_rms: optional float32 output, one
    per row. block_scale: scales of a block-quantized output, columns / block_size a row;
    block_size is 0 for an output that is not block-quantized.
    """

    node: str
    rows: int
    columns: int
    input: View
    weight: View
    bias: View | None
    epsilon: Scalar
    epilogue: Program
    output: View
    inverse_rms: View | None = None
    block_scale: View | None = None
    block_size: int = 0


def template(g: PatternGraph):
    y, inverse_rms = norm(g)
    return {"output": g.tail(y, ends=("block_scale_quantize",)), "inverse_rms": inverse_rms}


def norm(g: PatternGraph):
    """The normalization that every pattern of this family starts with."""
    return g.rmsnorm(
        input=g.capture("input"),
        scale=g.capture("scale"),
        epsilon=g.capture("epsilon"),
        bias=g.capture("bias", optional=True),
    )


def facts(match: Match) -> RmsNormFacts | No:
    """What the match computes, as rows x columns; No if a tensor cannot be seen that way."""
    graph, end = match.graph, match.end
    for node in match.subgraph.nodes:
        if node.compute is not data_type.FLOAT:
            return No(f"{node} computes in {node.compute.name}; accepted: FLOAT")
        for _, t in node.outputs:
            made = graph.tensors[t]
            if made.virtual and made.dtype is not data_type.FLOAT:
                return No(f"{made} is rounded to {made.dtype.name} between nodes; accepted: FLOAT")
            if made.reordering is not tensor_reordering.NONE:
                return No(f"{made} is reordered; accepted: row-major scales")
    tensors = {name: graph.tensors[t] for name, t in match.tensors.items()}
    x, scale = tensors["input"], tensors["scale"]
    columns = tuple(axis for axis, extent in enumerate(scale.dim) if extent != 1)
    extent = 1
    for axis in columns:
        extent *= x.dim[axis]
    if end is not None:
        axis = quantize_axis(x.dim, dict(end.attributes))
        if axis not in columns[-1:]:
            return No(f"{end} quantizes along axis {axis}, not along the last normalized axis of {list(columns)}")
        tensors["output"] = graph.tensors[end.output("Y")]
        tensors["block_scale"] = graph.tensors[end.output("scale")]
    views = {name: view(tensor, columns) for name, tensor in tensors.items() if name != "epsilon"}
    for found in views.values():
        if isinstance(found, No):
            return found
    norm = match.node("rmsnorm")
    return RmsNormFacts(
        node=norm.name,
        rows=x.elements // extent if extent else 0,
        columns=extent,
        input=views["input"],
        weight=views["scale"],
        bias=views.get("bias"),
        epsilon=Scalar.of(tensors["epsilon"]),
        epilogue=match.program(norm.output("Y")),
        output=views["output"],
        inverse_rms=views.get("inverse_rms"),
        block_scale=views.get("block_scale"),
        block_size=end.attribute("block_size") if end else 0,
    )


def view(tensor: Tensor, columns: tuple[int, ...]) -> View | No:
    """`tensor` as rows x columns, the axes in `columns` being the columns."""
    if tensor.by_value:
        return No(f"{tensor} is passed by value; accepted for input, weight and bias: a tensor in memory")
    axes = range(len(tensor.dim))
    rows = merge((tensor.dim[a], tensor.stride[a]) for a in axes if a not in columns)
    packed = merge((tensor.dim[a], tensor.stride[a]) for a in columns)
    if len(packed) > 1:
        return No(f"{tensor}: the normalized axes {list(columns)} are not one run of elements with one stride")
    width = packed[0][0] if packed else 1
    declared = [tensor.stride[a] for a in axes if a not in columns]
    if not rows and declared and declared[0] >= width:
        rows = ((1, declared[0]),)
    return View(tensor.id, tensor.name, tensor.dtype, rows, packed[0][1] if packed else 1, tensor.alignment)


def merge(axes) -> tuple[tuple[int, int], ...]:
    """(extent, stride) pairs, outermost first, with neighbours joined where one stride serves
    both and extents of 1 left out; of an empty tensor, one pair with extent 0."""
    merged: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 0:
            return ((0, stride),)
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    return tuple(merged)


PATTERN = Pattern("rmsnorm", template, facts)
