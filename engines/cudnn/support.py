"""Checks whether cuDNN can be queried for some nodes. Those of the nodes do not import its package."""

from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.wording import counted
from graphfuse.contract.engine import No
from graphfuse.engines.cudnn import package, ranks
from graphfuse.engines.cudnn.op_rules import OP_RULES
from graphfuse.op_graph.ir import FrozenTensor, Subgraph

ALIGNMENT = 16
"""Alignment in bytes that the frontend declares to cuDNN for every address."""


BY_VALUE = {data_type.FLOAT: "f", data_type.DOUBLE: "d", data_type.HALF: "e"}
"""Data types in which numbers are passed by value, with their letters in ``struct``."""


def why_not(facts: Subgraph, device: Device) -> No | None:
    """First reason against the device, the nodes, their tensors or the installed package; None if there is none."""
    if device.kind != "cuda":
        return No(f"cuDNN runs on CUDA devices, not on {device}")
    if not device.here:
        return No(f"cuDNN plans for devices of this machine, not for {device.described}")
    found = unsupported(facts)
    if found is not None:
        return found
    loaded = package.load()
    return loaded if isinstance(loaded, No) else None


def unsupported(facts: Subgraph) -> No | None:
    """First reason against the nodes or their tensors, which does not depend on the machine; None if there is none."""
    graph = facts.graph
    for node in facts.nodes:
        rule = OP_RULES.get(node.op_name)
        if rule is None:
            return No(f"{node} is no operation of cuDNN's, or one with other results")
        why = rule.why_not(graph, node)
        if why is not None:
            return No(f"{node} {why}")
    placed = ranks.layouts(graph, facts.nodes)
    for node in facts.nodes:
        _, first = node.inputs[0]
        own, widened = len(graph.tensors[first].dim), len(placed[first][0])
        if OP_RULES[node.op_name].axes and own != widened:
            return No(f"{node} reads {graph.tensors[first]}, which cuDNN gets with {widened} axes")
    ports = {t: (node, port) for node in facts.nodes for port, t in node.inputs}
    for number in dict.fromkeys(t for node in facts.nodes for _, t in (*node.inputs, *node.outputs)):
        why = _tensor_reason(graph.tensors[number])
        if why is not None:
            return No(f"{graph.tensors[number]} {why}")
    inside = set(facts.node_ids)
    for node in facts.nodes:
        for _, number in node.outputs:
            t = graph.tensors[number]
            if t.dtype is not node.compute and not inside.isdisjoint(graph.consumers.get(number, ())):
                reader, port = ports[number]
                return No(
                    f"{reader} reads {port} as {t.dtype.name}, rounded from {node.compute.name}; inside one plan of "
                    f"cuDNN's it may be read unrounded"
                )
    return None


def _tensor_reason(t: FrozenTensor) -> str | None:
    if not t.elements:
        return "has no elements"
    if t.reordering is not tensor_reordering.NONE:
        return f"is reordered as {t.reordering.name}"
    if t.dtype is data_type.FP4_E2M1:
        return "packs two elements a byte"
    if t.by_value and t.dtype not in BY_VALUE:
        accepted = ", ".join(dtype.name for dtype in BY_VALUE)
        return f"is passed by value as {t.dtype.name}; accepted: {accepted}"
    if not t.by_value and not t.virtual and t.alignment < ALIGNMENT:
        return f"is aligned to {counted(t.alignment, 'byte')}; cuDNN requires {ALIGNMENT}"
    return None
