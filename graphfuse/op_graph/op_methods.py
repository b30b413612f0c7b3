"""The op methods of a user's graph, generated from the op table.

``tests/op_stub.py`` writes their types to ``op_methods.pyi``, for type checkers and editors."""

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph import vocabulary
from graphfuse.ops import Op


def _add_node(graph, op: Op, given: dict[str, object], compute_data_type, name: str):
    return graph._add(op, given, compute_data_type, name)


@vocabulary.methods(_add_node, {"compute_data_type": data_type.NOT_SET, "name": ""})
class OpMethods:
    """One method per op. It adds a node, and returns the tensors that the node writes."""
