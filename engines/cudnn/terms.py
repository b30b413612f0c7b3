"""The order in which cuDNN is told what is added to a convolution.

cuDNN has ready-made kernels for a convolution, plus a tensor of its shape, plus a bias, in this order and with the sum
so far as the first operand. For the same sum in any other order it compiles a kernel for the graph, and has fewer to
choose from.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.ir import Node, Subgraph, TensorId


def ordered(facts: Subgraph) -> tuple[Node, ...]:
    """The nodes, with the terms of each sum in that order. Every tensor that is written has the same value but for the
    order in which float32 terms are added, which is the plan's own within a convolution as well."""
    changed: dict[str, Node] = {}
    for node in facts.nodes:
        if node.op_name == "conv_fprop":
            changed |= _sum(facts, node)
    return tuple(changed.get(node.name, node) for node in facts.nodes)


def _sum(facts: Subgraph, product: Node) -> Mapping[str, Node]:
    """The additions that directly follow a product, by name, each with its new operands."""
    graph = facts.graph
    (first,) = (t for _, t in product.outputs)
    additions, terms, total = [], [], first
    while (found := _addition(facts, total)) is not None:
        node, term = found
        additions.append(node)
        terms.append(term)
        ((_, total),) = node.outputs
    # Of those that are of one shape, as they were.
    terms.sort(key=lambda t: graph.tensors[t].dim != graph.tensors[first].dim)
    made, total = {}, first
    for node, term in zip(additions, terms, strict=True):
        made[node.name] = replace(node, inputs=(("a", total), ("b", term)))
        ((_, total),) = node.outputs
    return made


def _addition(facts: Subgraph, total: TensorId) -> tuple[Node, TensorId] | None:
    """Node that adds a term from outside to `total`, which nothing else reads, and the term. The sum has the shape of
    `total`: no term is larger."""
    readers = facts.graph.consumers.get(total, ())
    if total in facts.outputs or len(readers) != 1 or readers[0] not in facts.node_ids:
        return None
    node = facts.graph.nodes[readers[0]]
    if node.op_name != "add" or node.compute is not data_type.FLOAT:
        return None
    (term,), ((_, made),) = (t for _, t in node.inputs if t != total), node.outputs
    fits = facts.graph.tensors[made].dim == facts.graph.tensors[total].dim
    return (node, term) if term in facts.inputs and fits else None
