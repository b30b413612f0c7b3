"""Translates nodes to a ``cudnn.pygraph``, in which tensors keep their uids."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from graphfuse.base.dtypes import data_type
from graphfuse.engines.cudnn.op_rules import OP_RULES
from graphfuse.engines.cudnn.ranks import Layout, layouts
from graphfuse.engines.cudnn.terms import ordered
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph, TensorId


@dataclass(frozen=True)
class Translation:
    """A cuDNN graph and its tensors. graph: the ``cudnn.pygraph``, not validated. bound: tensor -> uid, for tensors
    whose address execute gives. by_value: tensor -> uid, for scalars whose number execute gives. constants: uid ->
    number, for scalars with a number in the graph."""

    graph: object
    bound: Mapping[TensorId, int]
    by_value: Mapping[TensorId, int]
    constants: Mapping[int, float]


def translate(cudnn: ModuleType, facts: Subgraph, handle: object = None) -> Translation:
    """Translation of `facts`, against which ``support.unsupported`` must have no reason.

    Tensors that other nodes of the graph read are outputs, too. handle: cuDNN's, if the graph is to be planned.
    """
    graph = cudnn.pygraph(
        name=facts.graph.name,
        io_data_type=cudnn.data_type.FLOAT,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    tensors = facts.graph.tensors
    placed = layouts(facts.graph, facts.nodes)
    translated: dict[TensorId, object] = {}
    for number in _read(facts):
        translated[number] = _given(cudnn, graph, tensors[number], placed[number])
    outputs = frozenset(facts.outputs)
    for node in ordered(facts):
        for number, made in zip(
            (t for _, t in node.outputs), _made(cudnn, graph, facts, node, translated), strict=True
        ):
            translated[number] = made
            _set_up(cudnn, made, tensors[number], placed[number], number in outputs)
    external = [tensors[number] for number in (*_read(facts), *facts.outputs)]
    return Translation(
        graph,
        bound={t.id: t.uid for t in external if not t.by_value},
        by_value={t.id: t.uid for t in external if t.by_value and t.value is None},
        constants={t.uid: t.value for t in external if t.value is not None},
    )


def _numbers(facts: Subgraph, node: Node) -> dict[str, float]:
    """Constants that cuDNN accepts as numbers, by port."""
    found = {port: facts.graph.tensors[t].value for port, t in node.inputs if port in OP_RULES[node.op_name].numbers}
    return {port: value for port, value in found.items() if value is not None}


def _read(facts: Subgraph) -> tuple[TensorId, ...]:
    """Tensors that the nodes read from outside, without those that are passed as numbers."""
    ports = (t for node in facts.nodes for port, t in node.inputs if port not in _numbers(facts, node))
    inputs = frozenset(facts.inputs)
    return tuple(dict.fromkeys(t for t in ports if t in inputs))


def _given(cudnn: ModuleType, graph, t: FrozenTensor, layout: Layout):
    dim, stride = layout
    return graph.tensor(
        dim=list(dim),
        stride=list(stride),
        data_type=_type(cudnn, t.dtype),
        is_pass_by_value=t.by_value,
        name=t.name,
        uid=t.uid,
    )


def _made(cudnn: ModuleType, graph, facts: Subgraph, node: Node, translated: Mapping[TensorId, object]) -> list:
    """cuDNN's tensors for the outputs that the node has."""
    numbers = _numbers(facts, node)
    inputs = {port: numbers.get(port, translated.get(t)) for port, t in node.inputs}
    arguments = OP_RULES[node.op_name].arguments(cudnn, node)
    made = getattr(graph, node.op_name)(
        **inputs, **arguments, compute_data_type=_type(cudnn, node.compute), name=node.name
    )
    made = made if isinstance(made, list | tuple) else [made]
    ports = zip(node.op.returned, made, strict=True)
    return [t for port, t in ports if node.output(port.name) is not None]


def _set_up(cudnn: ModuleType, made, t: FrozenTensor, layout: Layout, output: bool) -> None:
    dim, stride = layout
    made.set_uid(t.uid).set_name(t.name).set_data_type(_type(cudnn, t.dtype)).set_output(output)
    made.set_dim(list(dim)).set_stride(list(stride))


def _type(cudnn: ModuleType, dtype: data_type):
    return getattr(cudnn.data_type, dtype.name)
