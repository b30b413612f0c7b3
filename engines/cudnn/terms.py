"""The order of the terms that are added to a convolution, for translation to cuDNN.

cuDNN has ready-made kernels for a convolution, plus a tensor of its shape, plus a bias, in this order and with the sum
so far as the first operand. For other orders it compiles a kernel for the graph, and has fewer kernels to choose from.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.ir import Node, Subgraph, TensorId


def ordered(facts: Subgraph) -> tuple[Node, ...]:
    """The nodes, with the terms of each sum in this order.

    Values of written tensors differ only by the order of float32 additions, which is the plan's within a convolution,
    too."""
    changed: dict[str, Node] = {}
    for node in facts.nodes:
        if node.op_name == "conv_fprop":
            changed |= _sum(facts, node)
    return tuple(changed.get(node.name, node) for node in facts.nodes)


def _sum(facts: Subgraph, product: Node) -> Mapping[str, Node]:
    """The additions that directly follow a convolution, by name, each with its new operands."""
    graph = facts.graph
    (first,) = (t for _, t in product.outputs)
    additions, terms, total = [], [], first
    while (found := _addition(facts, total)) is not None:
        node, term = found
        additions.append(node)
        terms.append(term)
        ((_, total),) = node.outputs
    # The sort is stable: terms of the same shape keep their order.
    terms.sort(key=lambda t: graph.tensors[t].dim != graph.tensors[first].dim)
    made, total = {}, first
    for node, term in zip(additions, terms, strict=True):
        made[node.name] = replace(node, inputs=(("a", total), ("b", term)))
        ((_, total),) = node.outputs
    return made


def _addition(facts: Subgraph, total: TensorId) -> tuple[Node, TensorId] | None:
    """The only node that reads `total`, if it adds an input of the region to it, and this term; None if there is none.

    The sum has the shape of `total`, so the term is not larger."""
    readers = facts.graph.consumers.get(total, ())
    if total in facts.outputs or len(readers) != 1 or readers[0] not in facts.node_ids:
        return None
    node = facts.graph.nodes[readers[0]]
    if node.op_name != "add" or node.compute is not data_type.FLOAT:
        return None
    (term,), ((_, made),) = (t for _, t in node.inputs if t != total), node.outputs
    fits = facts.graph.tensors[made].dim == facts.graph.tensors[total].dim
    return (node, term) if term in facts.inputs and fits else None
