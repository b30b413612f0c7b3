"""Ragged offsets of a node's tensors: the checks of ``freeze``, and the frozen node's inputs for them."""

from collections.abc import Collection, Mapping

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphValidationError
from graphfuse.base.ragged import BATCH, ROWS
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import OFFSETS

_RANK = 4
_TYPES = (data_type.INT32, data_type.INT64)


def offsets(node: NodeRecord) -> dict[str, Tensor]:
    """Tensors of offsets, by the frozen node's ports."""
    found = ((port, t.get_ragged_offset()) for port, t in _tensors(node).items())
    return {f"{port}{OFFSETS}": t for port, t in found if t is not None}


def check(graph: GraphRecord) -> None:
    """Raises GraphValidationError if a node does not accept a ragged tensor, or if its offsets do not fit it."""
    if all(t.get_ragged_offset() is None for t in graph.tensors):
        return
    made = {id(t) for node in graph.nodes for t in node.outputs.values()}
    given = {id(t) for t in graph.tensors} - made
    for node in graph.nodes:
        _check_node(node, given)


def _check_node(node: NodeRecord, given: Collection[int]) -> None:
    where = f"node {node.name!r} ({node.op.name})"
    for port, t in _tensors(node).items():
        found = t.get_ragged_offset()
        if found is None:
            continue
        if port not in node.op.ragged:
            accepted = "none of its tensors" if not node.op.ragged else ", ".join(node.op.ragged)
            raise GraphValidationError(f"{where}: {port} ({_named(t)}) is ragged; accepted as such: {accepted}")
        flag = node.op.ragged[port]
        if not node.attributes[flag]:
            raise GraphValidationError(f"{where}: {port} ({_named(t)}) is ragged; it needs {flag}=True")
        _check_tensor(where, port, t)
        _check_offsets(where, port, t, found, id(found) in given)


def _tensors(node: NodeRecord) -> Mapping[str, Tensor]:
    return {**node.inputs, **{port: t for port, t in node.outputs.items() if port not in node.absent}}


def _named(t: Tensor) -> str:
    return f"tensor {t.get_name()!r}"


def _check_tensor(where: str, port: str, t: Tensor) -> None:
    what = f"{where}: {port} ({_named(t)}) is ragged and"
    if t.get_is_virtual():
        raise GraphValidationError(f"{what} virtual: only what is in memory has batches that begin somewhere")
    if t.get_data_type().bits < 8:
        raise GraphValidationError(f"{what} packs two elements a byte; accepted: types of 8 bits or more")
    if len(t.get_dim()) != _RANK:
        raise GraphValidationError(f"{what} has dim {t.get_dim()}; accepted: [batch, heads, rows, columns]")
    if t.get_stride()[ROWS] < 1:
        raise GraphValidationError(f"{what} has stride {t.get_stride()[ROWS]} between rows; accepted: 1 or more")


def _check_offsets(where: str, port: str, t: Tensor, found: Tensor, is_given: bool) -> None:
    what = f"{where}: the ragged offset of {port} ({_named(t)}), {_named(found)},"
    if not is_given or found.get_is_virtual() or found.get_is_pass_by_value():
        raise GraphValidationError(f"{what} must be a tensor of this graph that execute is given in memory")
    if found.get_data_type() not in _TYPES:
        names = " or ".join(dtype.name for dtype in _TYPES)
        raise GraphValidationError(f"{what} is {found.get_data_type().name}; accepted: {names}")
    wanted = [t.get_dim()[BATCH] + 1, 1, 1, 1]
    if found.get_dim() != wanted:
        raise GraphValidationError(f"{what} has dim {found.get_dim()}; accepted: {wanted}")
