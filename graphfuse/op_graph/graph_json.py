"""Conversion of a validated graph to JSON and back: the recorded graph, with all that ``validate`` inferred.

Reading calls the graph's own methods, which check their arguments as for a user.
"""

from collections.abc import Mapping

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import SerializedError
from graphfuse.files import json_values
from graphfuse.files.json_values import field, integers, known, member
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import OPS

VERSION, RAGGED = 1, 2
"""Versions of the format. They increase with every change that earlier versions would read wrongly. Graphs with ragged
tensors have version RAGGED."""

_TYPES = ("io_data_type", "intermediate_data_type", "compute_data_type")
SETTINGS = ("name", *_TYPES, "intermediate_rounding", "takes_overrides")
"""Names of a graph's attributes that hold for all its tensors and nodes."""


def to_data(graph: GraphRecord) -> dict[str, object]:
    """The graph as JSON values. Tensors are in the order of the frozen graph; nodes refer to them by position."""
    kept = graph.kept
    places = {id(t): place for place, t in enumerate(kept)}
    return {
        "version": VERSION if all(t.get_ragged_offset() is None for t in kept) else RAGGED,
        "name": graph.name,
        **{name: getattr(graph, name).name for name in _TYPES},
        "intermediate_rounding": graph.intermediate_rounding,
        "takes_overrides": graph.takes_overrides,
        "tensors": [_tensor(t, places) for t in kept],
        "nodes": [_node(node, places) for node in graph.needed],
    }


def _tensor(t: Tensor, places: Mapping[int, int]) -> dict[str, object]:
    offsets = t.get_ragged_offset()
    ragged = {
        "offset": None if offsets is None else places[id(offsets)],
        "multiplier": t.get_ragged_offset_multiplier(),
    }
    return {
        "name": t.get_name(),
        "uid": t.current_uid,
        "dim": t.get_dim(),
        "stride": t.get_stride(),
        "data_type": t.get_data_type().name,
        "virtual": t.get_is_virtual(),
        "by_value": t.get_is_pass_by_value(),
        "value": json_values.encode(f"tensor {t.get_name()!r}", t.value),
        "alignment": t.get_byte_alignment(),
        "reordering": t.get_reordering_type().name,
        **({} if offsets is None else {"ragged": ragged}),
    }


def _node(node: NodeRecord, places: Mapping[int, int]) -> dict[str, object]:
    where = f"node {node.name!r}"
    return {
        "name": node.name,
        "op": node.op.name,
        "inputs": {port: places[id(t)] for port, t in node.inputs.items()},
        "outputs": {port: places[id(t)] for port, t in node.outputs.items() if port not in node.absent},
        "attributes": {k: json_values.encode(f"{where}: {k}", value) for k, value in node.attributes.items()},
        "compute": node.compute.name,
    }


def settings(data: object) -> dict[str, object]:
    """The values of ``SETTINGS``. Raises SerializedError for an unknown version of the format."""
    version = field("the graph", data, "version", int)
    if version not in (VERSION, RAGGED):
        json_values.refuse("the graph's version", version, f"{VERSION} or {RAGGED}")
    types = {name: member("the graph", data, name, data_type) for name in _TYPES}
    rounding = field("the graph", data, "intermediate_rounding", str)
    return {
        "name": field("the graph", data, "name", str),
        **types,
        "intermediate_rounding": rounding,
        "takes_overrides": field("the graph", data, "takes_overrides", bool),
    }


def fill(graph: GraphRecord, data: object) -> None:
    """Makes the tensors and nodes of `data` in an empty graph. Raises SerializedError, or as the graph's methods."""
    tensors, nodes = field("the graph", data, "tensors", list), field("the graph", data, "nodes", list)
    producers = _producers(nodes, len(tensors))
    made: list[Tensor | None] = [None] * len(tensors)
    added = 0
    for place, t in enumerate(tensors):
        if place not in producers:
            made[place] = _add_tensor(graph, f"tensor {place}", t)
        elif made[place] is None:
            if producers[place] != added:
                raise SerializedError(f"node {added}: its outputs are not in the order of the nodes")
            _add_node(graph, f"node {added}", nodes[added], tensors, made)
            added += 1
    if added != len(nodes):
        raise SerializedError(f"node {added} writes no tensor")
    for place, t in enumerate(tensors):
        if "ragged" in t:
            _set_offsets(f"tensor {place}", made[place], field(f"tensor {place}", t, "ragged", dict), made)


def _set_offsets(where: str, t: Tensor, data: dict, made: list[Tensor | None]) -> None:
    place = field(f"{where}: ragged", data, "offset", int)
    if not 0 <= place < len(made):
        json_values.refuse(f"{where}: ragged offset", place, f"a tensor's place, 0 to {len(made) - 1}")
    t.set_ragged_offset(made[place])
    t.set_ragged_offset_multiplier(field(f"{where}: ragged", data, "multiplier", int))


def _producers(nodes: list, tensors: int) -> dict[int, int]:
    """Position of a tensor -> number of the node that writes it."""
    found: dict[int, int] = {}
    for number, node in enumerate(nodes):
        for kind in ("inputs", "outputs"):
            for port, place in field(f"node {number}", node, kind, dict).items():
                if type(place) is not int or not 0 <= place < tensors:
                    json_values.refuse(f"node {number}: {port}", place, f"a tensor's place, 0 to {tensors - 1}")
                if kind == "outputs" and found.setdefault(place, number) != number:
                    raise SerializedError(f"tensor {place} is written by nodes {found[place]} and {number}")
    return found


def _add_tensor(graph: GraphRecord, where: str, data: object) -> Tensor:
    value = json_values.decode(where, field(where, data, "value", dict, type(None)))
    dtype = member(where, data, "data_type", data_type)
    if value is None:
        made = graph.tensor(integers(where, data, "dim"), integers(where, data, "stride"), dtype)
    elif type(value) is float:
        made = graph.tensor_scalar(value, dtype)
    else:
        json_values.refuse(f"{where}: value", value, "a float or null")
    _set_up(made, where, data)
    return made


def _set_up(t: Tensor, where: str, data: object) -> None:
    """Sets all properties of a tensor."""
    t.set_name(field(where, data, "name", str)).set_uid(field(where, data, "uid", int))
    t.set_dim(integers(where, data, "dim")).set_stride(integers(where, data, "stride"))
    t.set_data_type(member(where, data, "data_type", data_type))
    t.set_is_virtual(field(where, data, "virtual", bool)).set_is_pass_by_value(field(where, data, "by_value", bool))
    t.set_byte_alignment(field(where, data, "alignment", int))
    t.set_reordering_type(member(where, data, "reordering", tensor_reordering))


def _add_node(graph: GraphRecord, where: str, data: object, tensors: list, made: list[Tensor | None]) -> None:
    """Makes a node, and puts its outputs at their positions in `made`."""
    op = OPS.get(field(where, data, "op", str))
    if op is None:
        json_values.refuse(f"{where}: op", data["op"], "an operation of graphfuse")
    inputs, outputs = field(where, data, "inputs", dict), field(where, data, "outputs", dict)
    attributes = field(where, data, "attributes", dict)
    known(f"{where}: an input", [*inputs], [port.name for port in op.inputs])
    known(f"{where}: an attribute", [*attributes], [attribute.name for attribute in op.attributes])
    for port, place in inputs.items():
        if made[place] is None:
            raise SerializedError(f"{where}: {port} is tensor {place}, which is made after it")
    given = {port: made[place] for port, place in inputs.items()}
    given |= {
        port: _add_tensor(graph, f"{where}: {port}", tensors[outputs[port]]) for port in op.given if port in outputs
    }
    given |= {name: json_values.decode(f"{where}: {name}", value) for name, value in attributes.items()}
    compute, name = member(where, data, "compute", data_type), field(where, data, "name", str)
    getattr(graph, op.name)(**given, compute_data_type=compute, name=name)
    node = graph.nodes[-1]
    written = [port for port in node.outputs if port not in node.absent]
    if node.name != name or sorted(outputs) != sorted(written):
        json_values.refuse(f"{where}: outputs", sorted(outputs), ", ".join(sorted(written)))
    if len(set(outputs.values())) != len(outputs):
        raise SerializedError(f"{where}: two of its outputs are one tensor")
    for port, place in outputs.items():
        made[place] = node.outputs[port]
        _set_up(made[place], f"tensor {place}", tensors[place])
