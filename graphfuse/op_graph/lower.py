"""Rewrites of the frozen graph: nodes that users may leave implicit, and reductions that are divided in two."""

from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.op_graph import verify
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, packed_stride
from graphfuse.op_graph.split_reductions import split_reductions
from graphfuse.ops import OPS, block_size

_BLOCK = block_size(data_type.FP4_E2M1)
_ROW = 128


def lower(graph: FrozenGraph) -> FrozenGraph:
    """The graph after all rewrites, checked."""
    lowered = split_reductions(_explicit_block_scales(graph))
    verify.check_ir(lowered)
    return lowered


def _explicit_block_scales(graph: FrozenGraph) -> FrozenGraph:
    """The graph with a block_scale_quantize for an FP4 output of another op.

    It has blocks of 16. Its scales go to the workspace, at the offset that cuDNN's engine uses."""
    implicit = [
        (i, port, graph.tensors[t])
        for i, node in enumerate(graph.nodes)
        for port, t in node.outputs
        if graph.tensors[t].dtype is data_type.FP4_E2M1 and not graph.tensors[t].virtual
        if node.op_name != "block_scale_quantize"
    ]
    if not implicit:
        return graph
    if len(implicit) > 1:
        names = ", ".join(repr(t.name) for _, _, t in implicit)
        raise GraphNotSupportedError(
            f"tensors {names} are FP4_E2M1 without block_scale_quantize: the workspace holds the scales of one; "
            "quantize them with block_scale_quantize, which returns the scales"
        )
    index, port, output = implicit[0]
    if graph.nodes[index].op.keeps(port):
        raise GraphNotSupportedError(f"{output} is FP4_E2M1 and kept in part, but the scales of what is kept are not")
    if output.id in graph.consumers:
        raise GraphNotSupportedError(f"{output} is read by another node, which its block scales do not reach")
    axis = output.packed_axis
    if axis is None or output.dim[axis] % _BLOCK:
        raise GraphNotSupportedError(
            f"{output} is quantized in blocks of {_BLOCK} along its packed axis, "
            f"whose extent must be a multiple of {_BLOCK}"
        )
    dim = tuple(e // _BLOCK if a == axis else e for a, e in enumerate(output.dim))
    order = sorted(range(len(dim)), key=lambda a: (a == axis, a))
    values = replace(
        output,
        id=len(graph.tensors),
        uid=_free_uid(graph, 0),
        name=f"{output.name}::values",
        dtype=graph.nodes[index].compute,
        virtual=True,
    )
    scales = FrozenTensor(
        id=values.id + 1,
        uid=_free_uid(graph, 1),
        name=f"{output.name}::block_scale",
        dtype=data_type.FP8_E4M3,
        dim=dim,
        stride=packed_stride(dim, order),
        workspace=block_scale_offset(output.elements // max(output.dim[axis], 1)),
    )
    node = graph.nodes[index]
    renamed = tuple((p, values.id if t == output.id else t) for p, t in node.outputs)
    quantizer = OPS["block_scale_quantize"]
    attributes = {a.name: a.default for a in quantizer.attributes} | {"axis": axis}
    shapes = {port: (shape, data_type.FP4_E2M1) for port, shape in (("Y", output.dim), ("scale", dim))}
    attributes = quantizer.frozen(attributes, {"input": output.dim}, shapes)
    quantize = Node(
        f"{node.name}::block_scale_quantize",
        "block_scale_quantize",
        (("input", values.id),),
        (("Y", output.id), ("scale", scales.id)),
        tuple(attributes.items()),
        node.compute,
    )
    nodes = graph.nodes[:index] + (replace(node, outputs=renamed), quantize) + graph.nodes[index + 1 :]
    return FrozenGraph(graph.name, graph.tensors + (values, scales), nodes)


def block_scale_offset(rows: int) -> int:
    """Byte offset of implicit NVFP4 scales in the workspace.

    cuDNN's row statistics (4 bytes per row) and a 4-byte counter precede them, each rounded up to 128 bytes."""
    return -(-4 * rows // _ROW) * _ROW + -(-4 // _ROW) * _ROW


def _free_uid(graph: FrozenGraph, offset: int) -> int:
    return max((t.uid for t in graph.tensors), default=0) + 1 + offset
