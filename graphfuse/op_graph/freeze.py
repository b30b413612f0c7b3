"""Conversion of the user's graph to the frozen IR: infers shapes, strides and data types, and checks them.

It also decides the dtype of virtual tensors: their node's compute type or, with intermediate_rounding "declared", the
type that they declare. A node that moves integers or float64 to a node that distinguishes them keeps their type. An
operand of a product keeps the type that it declares, also through nodes that only move it: tensor cores multiply that
type.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from graphfuse.base.dtypes import FACTS, common_type, data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import GraphValidationError
from graphfuse.op_graph import ir, ragged, verify
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.tensor import Tensor, checked_number
from graphfuse.ops.layouts import packed_like

COMPUTE_TYPES = (data_type.FLOAT, data_type.DOUBLE, data_type.INT32)
# E8M0 holds only powers of two: it is a type of scales, to which results are not rounded.
OUTPUT_TYPES = tuple(dtype for dtype in FACTS if dtype is not data_type.FP8_E8M0)


def freeze(graph: GraphRecord) -> ir.FrozenGraph:
    """The IR of `graph`. Writes inferred dim, stride and data type back to the user's tensors."""
    if not graph.nodes:
        raise GraphValidationError(f"graph {graph.name!r} has no nodes")
    for t in graph.tensors:
        t.clear_inferred()
    needed, kept = graph.needed, graph.kept
    written = {id(t) for node in graph.nodes for t in node.outputs.values()}
    for t in graph.tensors:
        if id(t) not in written:
            _infer_data_type(graph, t, None)
    for node in needed:
        infer(graph, node)
    for t in graph.tensors:
        if t.value is not None and not t.get_dim():
            t.inferred_dim = t.inferred_stride = (1,)  # a constant that no node reads
    ragged.check(graph)
    ids = {id(t): i for i, t in enumerate(kept)}
    carried = _carried(graph, needed)
    nodes = tuple(_freeze_node(node, ids) for node in needed)
    blocks = _blocks(nodes)
    tensors = tuple(
        _freeze_tensor(i, t, carried.get(id(t), t.get_data_type()), blocks.get(i, -1), ids) for i, t in enumerate(kept)
    )
    frozen = ir.FrozenGraph(graph.name, tensors, nodes)
    verify.check_ir(frozen)
    _check_live(frozen)
    return frozen


def infer(graph: GraphRecord, node: NodeRecord) -> None:
    """Infers shapes, strides and data types of a node's outputs that are not set. Those of its inputs are known."""
    where = f"node {node.name!r} ({node.op.name})"
    computes = [dtype for dtype in COMPUTE_TYPES if dtype.is_float or node.op.integers]
    if node.compute not in computes:
        raise GraphValidationError(
            f"{where}: compute data type is {node.compute.name}; accepted: {', '.join(c.name for c in computes)}"
        )
    _check_types(where, node)
    given = [t for t in node.inputs.values() if t.value is None] or node.inputs.values()
    rank = max(len(t.get_dim()) for t in given) or 1
    for t in node.inputs.values():
        if t.value is not None and not t.get_dim():
            t.inferred_dim = t.inferred_stride = (1,) * rank
    shapes = _shapes(node.inputs)
    wanted = {port: shape for port, shape in _shapes(node.outputs).items() if shape}
    try:
        inferred = node.op.infer(shapes, node.attributes, wanted)
    except GraphValidationError as error:
        raise GraphValidationError(f"{where}: {error}{_shared_constants(node, rank)}") from None
    defaults, stored = {p.name: p.dtype for p in node.op.outputs}, node.op.stored(node.attributes)
    for port, t in node.outputs.items():
        if port in node.absent:
            if not t.get_is_virtual():
                raise GraphValidationError(
                    f"{where}: {port} is marked as output, but with {_given(node)} the node does not write it"
                )
            continue
        shape = tuple(inferred[port])
        if not t.get_dim():
            t.inferred_dim = shape
        elif tuple(t.get_dim()) != shape:
            raise GraphValidationError(f"{where}: {port} has dim {t.get_dim()}, but the node makes {list(shape)}")
        if not t.get_stride():
            t.inferred_stride = _stride(node, shape)
        accepted = stored.get(port, OUTPUT_TYPES)
        _infer_data_type(graph, t, accepted[0] if port in stored else defaults[port])
        if t.get_is_virtual() and node.op.keeps(port):
            raise GraphValidationError(
                f"{where}: {port} is virtual; accepted: an output, whose memory it keeps in part"
            )
        if not t.get_is_virtual() and t.get_data_type() not in accepted:
            names = ", ".join(dtype.name for dtype in accepted)
            raise GraphValidationError(f"{where}: {port} is stored as {t.get_data_type().name}; accepted: {names}")


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {port: tuple(t.get_dim()) for port, t in tensors.items()}


def _shared_constants(node: NodeRecord, rank: int) -> str:
    """Hint for an error, if a constant got its rank from an earlier node; else empty."""
    for t in node.inputs.values():
        if t.value is not None and len(t.inferred_dim) not in (0, rank):
            return f"; constant {t.get_name()!r} has the rank of the node that reads it first: make one for each rank"
    return ""


def _stride(node: NodeRecord, dim: tuple[int, ...]) -> tuple[int, ...]:
    if node.op.strides is not None:
        return node.op.strides(dim, node.attributes, {port: tuple(t.get_stride()) for port, t in node.inputs.items()})
    alike = (i for i in node.inputs.values() if tuple(i.get_dim()) == dim)
    like = next(alike, next(iter(node.inputs.values())))
    return packed_like(dim, like.get_dim(), like.get_stride())


def _infer_data_type(graph: GraphRecord, t: Tensor, default: data_type | None) -> None:
    if t.get_data_type() is not data_type.NOT_SET:
        return
    # As in cuDNN's frontend: a graph's default type for intermediates is that of inputs and outputs, or FLOAT.
    between = (graph.intermediate_data_type, graph.io_data_type, data_type.FLOAT)
    known = between if t.get_is_virtual() else (graph.io_data_type,)
    t.inferred_data_type = default or next((d for d in known if d is not data_type.NOT_SET), data_type.NOT_SET)
    if t.get_data_type() is data_type.NOT_SET:
        raise GraphValidationError(
            f"tensor {t.get_name()!r} has no data type: call set_data_type, or give the graph an io_data_type"
        )


def _carried(graph: GraphRecord, nodes: Sequence[NodeRecord]) -> dict[int, data_type]:
    """Types of virtual tensors, by id of the user's tensor, if they differ from the declared ones."""
    if graph.intermediate_rounding == "declared":
        return {}
    carried: dict[int, data_type] = {}
    multiplied = {
        id(node.inputs[port.name])
        for node in nodes
        for port in node.op.inputs
        if port.declared and port.name in node.inputs
    }
    readers: dict[int, set[data_type | None]] = {}
    reads: Counter[int] = Counter()
    for node in nodes:
        for port, t in node.inputs.items():
            readers.setdefault(id(t), set()).add(None if port in node.op.exact else node.compute)
            reads[id(t)] += 1
    for node in reversed(nodes):
        # An operand that is only moved to a product is rounded before the move.
        types = {t.get_data_type() for t in node.outputs.values() if id(t) in multiplied}
        sources = (node.inputs[port] for port in node.op.moved)
        multiplied |= {id(t) for t in sources if reads[id(t)] == 1 and t.get_data_type() in types}
    for node in nodes:
        moved = {carried.get(id(t), t.get_data_type()) for t in (node.inputs[port] for port in node.op.moved)}
        held = common_type(moved)
        for t in (t for t in node.outputs.values() if t.get_is_virtual()):
            # If all readers round it to the compute type anyway, it has that type: engines read no other.
            is_kept = held.is_wide and readers.get(id(t)) != {node.compute}
            carried[id(t)] = held if is_kept else node.compute
            if id(t) in multiplied:
                carried[id(t)] = t.get_data_type()
    return carried


def _blocks(nodes: Sequence[ir.Node]) -> dict[int, int]:
    """Number of a tensor of scales -> axis of its blocks."""
    along = (found for node in nodes for found in node.scales.items())
    return {t: axis for t, axis in along if isinstance(axis, int)}


def _freeze_tensor(number: int, t: Tensor, dtype: data_type, blocks: int, ids: Mapping[int, int]) -> ir.FrozenTensor:
    if t.value is not None:
        checked_number(f"tensor {t.get_name()!r}", t.value, t.get_data_type())
    reordered = t.get_reordering_type() is not tensor_reordering.NONE
    offsets = t.get_ragged_offset()
    return ir.FrozenTensor(
        id=number,
        uid=t.current_uid,
        name=t.get_name(),
        dtype=dtype,
        dim=tuple(t.get_dim()),
        stride=packed_stride(t.get_dim()) if reordered else tuple(t.get_stride()),
        virtual=t.get_is_virtual(),
        by_value=t.get_is_pass_by_value(),
        value=t.value,
        alignment=t.get_byte_alignment(),
        reordering=t.get_reordering_type(),
        blocks=blocks if reordered and blocks != len(t.get_dim()) - 1 else -1,
        ragged=None if offsets is None else ids.get(id(offsets)),
        multiplier=t.get_ragged_offset_multiplier(),
    )


def _freeze_node(node: NodeRecord, ids: dict[int, int]) -> ir.Node:
    written = {port: t for port, t in node.outputs.items() if port not in node.absent}
    outputs = {port: (tuple(t.get_dim()), t.get_data_type()) for port, t in written.items()}
    return ir.Node(
        name=node.name,
        op_name=node.op.name,
        inputs=tuple((port, ids[id(t)]) for port, t in {**node.inputs, **ragged.offsets(node)}.items()),
        outputs=tuple((port, ids[id(node.outputs[port])]) for port in outputs),
        attributes=(*node.op.frozen(node.attributes, _shapes(node.inputs), outputs).items(), *_types(node)),
        compute=node.compute,
    )


def _types(node: NodeRecord) -> Iterator[tuple[str, data_type]]:
    """Attributes with the types of inputs, if the node's result depends on them."""
    for port in node.op.inputs:
        if port.types and not port.numbers:
            yield f"{port.name}_type", node.inputs[port.name].get_data_type()


def _check_types(where: str, node: NodeRecord) -> None:
    for port in node.op.inputs:
        t = node.inputs.get(port.name)
        if port.types and t is not None and t.get_data_type() not in port.types:
            names = " or ".join(dtype.name for dtype in port.types)
            raise GraphValidationError(f"{where}: {port.name} is {t.get_data_type().name}; accepted: {names}")


def _given(node: NodeRecord) -> str:
    given = [f"{name}={value}" for name, value in node.attributes.items()]
    return ", ".join([*given, *(f"no {p.name}" for p in node.op.inputs if p.name not in node.inputs)])


def _check_live(graph: ir.FrozenGraph) -> None:
    if not graph.outputs:
        raise GraphValidationError(f"graph {graph.name!r} has no output: call set_output(True) on what it should write")
    for node in graph.nodes:
        if all(graph.tensors[t].virtual and t not in graph.consumers for _, t in node.outputs):
            raise GraphValidationError(f"{node}: nothing reads its result; call set_output(True) on it or leave it out")
