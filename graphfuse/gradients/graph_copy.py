"""Copies of graphs and tensors, which can be changed independently of the user's graph."""

from collections.abc import Callable

from graphfuse.api import pygraph
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.tensor import Tensor

Attributes = dict[str, object]


def copy_of(graph: GraphRecord, attributes: Callable[[NodeRecord], Attributes]) -> tuple[pygraph, dict[Tensor, Tensor]]:
    """A copy of a validated graph, and the copies by the original tensors. attributes: those of a node's copy."""
    made = pygraph(
        graph.name,
        graph.io_data_type,
        graph.intermediate_data_type,
        graph.compute_data_type,
        getattr(graph, "handle", None),
        intermediate_rounding=graph.intermediate_rounding,
    )
    copies: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        for t in node.inputs.values():
            if t not in copies:
                copies[t] = leaf(made, t)
        inputs = {port: copies[t] for port, t in node.inputs.items()}
        getattr(made, node.op.name)(**inputs, **attributes(node), compute_data_type=node.compute, name=node.name)
        for port, t in made.nodes[-1].outputs.items():
            copies[node.outputs[port]] = _set_up_like(t, node.outputs[port])
    for t, copy in copies.items():
        copy.set_uid(t.current_uid)
    return made, copies


def leaf(graph: pygraph, t: Tensor) -> Tensor:
    """A tensor of `graph` like one of another graph: an input, or a constant."""
    if t.value is not None:
        return graph.tensor_scalar(t.value, t.get_data_type(), t.get_name())
    return graph.tensor_like(t, t.get_name()).set_is_virtual(False)


def _set_up_like(made: Tensor, t: Tensor) -> Tensor:
    made.set_name(t.get_name()).set_is_virtual(t.get_is_virtual()).set_byte_alignment(t.get_byte_alignment())
    made.set_reordering_type(t.get_reordering_type())
    if t.get_dim():
        made.set_dim(t.get_dim()).set_stride(t.get_stride()).set_data_type(t.get_data_type())
    return made
