"""Recording of the aten calls of a function as an FX graph."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.meaning import as_sequence
from graphfuse.torch.analysis.symbols import ForwardDeclined


def graph_of(function: Callable[..., Sequence[torch.Tensor]], given: Sequence[torch.Tensor]) -> Graph:
    """Graph of a call. Results of nodes are in meta["val"]. Raises ForwardDeclined if it depends on more than the given
    tensors, and any error that the function raises."""
    graph, found = Graph(), dict[torch.Tensor, Node]()

    def keep(tensor: torch.Tensor, node: Node) -> None:
        node.meta["val"] = tensor
        found[tensor] = node

    def node_of(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if value not in found:
            raise ForwardDeclined("reads a tensor that is neither given nor a parameter")
        return found[value]

    def write(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func.namespace == "aten":  # inference mode does not decompose composite operators
            with mode:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if torch.Tag.data_dependent_output in func.tags:
            raise ForwardDeclined("reads the value of a tensor")
        read = map_aggregate(args, node_of), map_aggregate(kwargs, node_of)
        made = func(*args, **kwargs)
        tensors = {place: t for place, t in enumerate(as_sequence(made)) if isinstance(t, torch.Tensor)}
        if not tensors:
            if func._schema.is_mutable:
                raise ForwardDeclined("changes a tensor in place")
            return made  # a property of a tensor, such as its device
        node = graph.call_function(func, *read)
        if isinstance(made, torch.Tensor):
            keep(made, node)
            return made
        node.meta["val"] = made
        for place, t in tensors.items():
            keep(t, graph.call_function(operator.getitem, (node, place)))
        return made

    mode = torch_private.dispatched_to(write)
    if mode is None:
        raise ForwardDeclined("this torch does not say what is called")
    for place, t in enumerate(given):
        keep(t, graph.placeholder(f"given_{place}"))
    with mode:
        made = function(*given)
    graph.output([node_of(t) for t in made])
    return graph
