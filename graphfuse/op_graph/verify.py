"""Checks of invariants between stages: of the frozen graph, and of a plan's partition of it."""

from collections.abc import Sequence

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import GraphValidationError
from graphfuse.base.ragged import BATCH
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, Subgraph
from graphfuse.ops.dequantization import scales

MAX_RANK = 8
_MOST_BYTES = 2**63 - 1  # offsets are signed 64-bit numbers


def check_ir(graph: FrozenGraph) -> None:
    """Raises GraphValidationError unless `graph` is well formed. Called after freezing and after each rewrite."""
    seen: set[int] = set()
    uids: dict[int, str] = {}
    for i, t in enumerate(graph.tensors):
        if t.id != i:
            raise GraphValidationError(f"{t} has id {t.id} at position {i}")
        if t.uid in uids:
            raise GraphValidationError(f"{t} has uid {t.uid}, which tensor {uids[t.uid]!r} has too; uids must differ")
        uids[t.uid] = t.name
        _check_tensor(t)
        if t.id not in graph.producer:
            seen.add(t.id)
            if t.virtual and t.id in graph.consumers:
                raise GraphValidationError(f"{t} is virtual but no node writes it")
        elif t.by_value:
            raise GraphValidationError(f"{t} is passed by value but {graph.nodes[graph.producer[t.id]]} writes it")
        elif _overlaps_itself(t):
            raise GraphValidationError(f"{t} is written but its strides map several elements to one address")
    for t in graph.tensors:
        if t.reordering is not tensor_reordering.NONE:
            _check_reordered(graph, t)
    for node in graph.nodes:
        if node.compute is data_type.INT32:
            _check_integers(graph, node)
        if node.op_name in _SCALES:
            _check_whole_tiles(graph, node, _SCALES[node.op_name])
        for port, t in node.inputs:
            if t not in seen:
                raise GraphValidationError(f"{node}: input {port!r} ({graph.tensors[t]}) is read before it is written")
        for port, t in node.outputs:
            if t in seen:
                raise GraphValidationError(f"{node}: output {port!r} ({graph.tensors[t]}) is written twice")
            seen.add(t)


def _check_tensor(t: FrozenTensor) -> None:
    if not 1 <= len(t.dim) <= MAX_RANK:
        raise GraphValidationError(f"{t} must have 1 to {MAX_RANK} dimensions")
    if len(t.stride) != len(t.dim):
        raise GraphValidationError(f"{t} must have one stride per dimension")
    if t.nbytes > _MOST_BYTES or t.elements > _MOST_BYTES:
        raise GraphValidationError(f"{t} spans more than 2^63 - 1 bytes")
    if t.value is not None and not t.by_value:
        raise GraphValidationError(f"{t} has the value {t.value} and must be passed by value")
    if t.by_value and t.elements != 1:
        raise GraphValidationError(f"{t} is passed by value and must have one element, it has {t.elements}")
    if t.dtype.bits < 8 and t.elements:
        axis = t.packed_axis
        others = [s for a, (e, s) in enumerate(zip(t.dim, t.stride, strict=True)) if e > 1 and a != axis]
        if axis is None or t.dim[axis] % 2 or any(s % 2 for s in others):
            raise GraphValidationError(
                f"{t} packs two elements a byte: one axis must have stride 1 and an even extent, "
                "other strides must be even"
            )


def _check_reordered(graph: FrozenGraph, t: FrozenTensor) -> None:
    of_blocks = [node for node in graph.nodes if t.id in node.scales]
    if not of_blocks or (t.id in graph.producer and graph.nodes[graph.producer[t.id]] not in of_blocks):
        raise GraphValidationError(
            f"{t} is reordered; accepted: scales that block_scale_quantize makes, or that block_scale_dequantize, "
            f"sdpa_mxfp8 or its backward reads"
        )
    if t.virtual:
        raise GraphValidationError(f"{t} is reordered and virtual: only what is in memory has an order there")
    if t.dtype.bits != 8:
        raise GraphValidationError(f"{t} is reordered as F8_128x4; accepted: scales of 8 bits")
    made = t.id in graph.producer
    axis = len(t.dim) - 1 if made else t.blocks % len(t.dim)
    for node in of_blocks:
        along = node.scales[t.id]
        if along is None:
            sizes = list(node.attribute("block_size"))
            raise GraphValidationError(f"{t} is reordered and {node} has blocks of {sizes}; accepted: along one axis")
        if along != axis:
            raise GraphValidationError(
                f"{t} is reordered and {node} has blocks along axis {along}; accepted: blocks along "
                f"{'the last axis' if made else 'the axis of its other readers'}, {axis}"
            )


_SCALES = {"block_scale_dequantize": "descale", "block_scale_quantize": "scale"}


def _check_whole_tiles(graph: FrozenGraph, node: Node, port: str) -> None:
    """Raises GraphValidationError if scales have the extents of whole tiles without being reordered."""
    found = dict((*node.inputs, *node.outputs))
    if port not in found:
        return
    x, scale, sizes = graph.tensors[found["input"]], graph.tensors[found[port]], node.attribute("block_size")
    if isinstance(sizes, int):
        sizes = [sizes if axis == node.attribute("axis") else 1 for axis in range(len(x.dim))]
    exact = scales(x.dim, sizes)
    if scale.dim != exact and scale.reordering is tensor_reordering.NONE:
        raise GraphValidationError(
            f"{node}: {port} ({scale}) has the extents of whole tiles; accepted: {list(exact)}, or these reordered as "
            f"F8_128x4"
        )


_INTEGERS = (data_type.INT8, data_type.UINT8, data_type.INT32, data_type.BOOLEAN)
"""Types whose values fit INT32."""


def _check_integers(graph: FrozenGraph, node: Node) -> None:
    for port, number in node.inputs:
        t = graph.tensors[number]
        is_whole = t.value is not None and t.value.is_integer() and -(2**31) <= t.value < 2**31
        if t.dtype not in _INTEGERS and not is_whole:
            accepted = ", ".join(dtype.name for dtype in _INTEGERS)
            raise GraphValidationError(
                f"{node} computes in INT32 and {port} ({t}) is {t.dtype.name if t.value is None else t.value}; "
                f"accepted: {accepted}, and numbers that INT32 holds. A virtual tensor has the type that its node "
                f"computes in"
            )


def _overlaps_itself(t: FrozenTensor) -> bool:
    reach, axes = 0, zip(t.dim, t.stride, strict=True)
    apart = ((s, e) for axis, (e, s) in enumerate(axes) if e > 1 and (t.ragged is None or axis != BATCH))
    for stride, extent in sorted(apart):
        if stride <= reach:
            return bool(t.elements)
        reach += (extent - 1) * stride
    return False


def check_partition(graph: FrozenGraph, regions: Sequence[Subgraph]) -> None:
    """Raises GraphValidationError unless `regions`, in order, compute every node once, after its producers."""
    done: set[int] = set()
    for region in regions:
        for i in region.node_ids:
            if i in done:
                raise GraphValidationError(f"{graph.nodes[i]} is planned twice")
        for t in region.inputs:
            made_by = graph.producer.get(t)
            if made_by is not None and made_by not in done:
                raise GraphValidationError(f"{graph.tensors[t]} is read before {graph.nodes[made_by]} has run")
        done.update(region.node_ids)
    missing = [str(node) for i, node in enumerate(graph.nodes) if i not in done]
    if missing:
        raise GraphValidationError(f"not planned: {', '.join(missing)}")
