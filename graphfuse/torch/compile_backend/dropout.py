"""Dropouts in graphs that inductor compiles, rewritten with keys for their random numbers, so that they can be steps of
a region.

The dropped elements differ from eager mode's, as they do in inductor's own kernels.
"""

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from graphfuse.functional.operator import LIBRARY
from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.torch.analysis import cost, inductor, surroundings
from graphfuse.torch.analysis.meaning import called_name, dtype, value, writes
from graphfuse.torch.analysis.new_nodes import insert, record

_KEYS = 2**24
"""Limit of seeds and offsets: they are float32, which has all integers up to this."""

LIBRARY.define(
    "keys(int count, *, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
)
LIBRARY.impl(
    "keys",
    lambda count, device: torch.randint(0, _KEYS, (count,), dtype=torch.float32, device=device),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "graphfuse::keys", lambda count, device: torch.empty(count, dtype=torch.float32, device=device), lib=LIBRARY
)
LIBRARY.define("keyed_dropout(Tensor input, Tensor seed, Tensor offset, float probability) -> Tensor")
torch.library.register_fake(
    "graphfuse::keyed_dropout", lambda input, seed, offset, probability: torch.empty_like(input), lib=LIBRARY
)


class KeyedDropouts:
    """Dropouts of a graph, rewritten with keys. Regions may include them; `restore` undoes the others."""

    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        around = surroundings.graph_parts(self._graph)
        found = [n for n in self._graph.nodes if n not in around.nested and _is_suitable(n)]
        self._plain = {node: (node.target, node.args, node.kwargs) for node in found}
        self._keys: list[Node] = []
        for device in {value(node).device: None for node in found}:
            self._give_keys([node for node in found if value(node).device == device], device)

    def _give_keys(self, nodes: Sequence[Node], device: torch.device) -> None:
        with self._graph.inserting_before(nodes[0]):
            keys = self._graph.call_function(torch.ops.graphfuse.keys.default, (2 * len(nodes),), {"device": device})
            record(keys, nodes[0], lambda x: x.new_empty(2 * len(nodes), dtype=torch.float32))
        for n, node in enumerate(nodes):
            with self._graph.inserting_before(node):
                pair = [insert(self._graph, torch.ops.aten.select.int, keys, 0, 2 * n + k) for k in range(2)]
            args = (node.all_input_nodes[0], *pair, inductor.rate_of_dropout(node))
            node.target, node.args, node.kwargs = torch.ops.graphfuse.keyed_dropout.default, args, {}
            self._keys += pair
        self._keys.append(keys)

    def restore(self) -> None:
        """Restore the dropouts that no region includes."""
        for node in self._graph.nodes:
            if node in self._plain:
                target, args, kwargs = self._plain[node]
                x, *_ = node.args
                node.target = target
                node.args, node.kwargs = ((x, *args[1:]), kwargs) if args else ((), kwargs | {"input": x})
        for node in self._keys:
            if not node.users:
                self._graph.erase_node(node)


def _is_suitable(node: Node) -> bool:
    if called_name(node) != "dropout" or inductor.is_free(node) or writes(node):
        return False
    made, probability = value(node), inductor.rate_of_dropout(node)
    if made is None or made.dtype not in FLOATS or made.device.type != cost.DEVICE or not made.dim():
        return False
    if hasattr(type(made), "__tensor_flatten__") or dtype(node.all_input_nodes[0]) is not made.dtype:
        return False
    return isinstance(probability, float) and 0 < probability < 1
