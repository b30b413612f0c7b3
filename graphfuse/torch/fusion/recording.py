"""The FX graph of what a function calls of aten."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from graphfuse.runtime import torch_private
from graphfuse.torch.fusion.meaning import several
from graphfuse.torch.fusion.symbols import ForwardDeclined


class _Recording:
    """Writes the calls that are made through it into a graph."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), torch_private.dispatched_to(self)
        # With the tensors, which live on so that no other gets the same id.
        self.found: dict[int, tuple[torch.Tensor, Node]] = {}

    def keep(self, tensor: torch.Tensor, node: Node) -> None:
        node.meta["val"] = tensor
        self.found[id(tensor)] = tensor, node

    def node(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.found:
            raise ForwardDeclined("reads a tensor that is neither given nor a parameter")
        return self.found[id(value)][1]

    def __call__(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func.namespace == "aten":  # in inference mode composite operators come whole
            with self.mode:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if torch.Tag.data_dependent_output in func.tags:
            raise ForwardDeclined("reads the value of a tensor")
        given = map_aggregate(args, self.node), map_aggregate(kwargs, self.node)
        made = func(*args, **kwargs)
        tensors = {place: t for place, t in enumerate(several(made)) if isinstance(t, torch.Tensor)}
        if not tensors:
            if func._schema.is_mutable:
                raise ForwardDeclined("changes a tensor in place")
            return made  # what is asked of a tensor, as its device
        node = self.graph.call_function(func, *given)
        if isinstance(made, torch.Tensor):
            self.keep(made, node)
            return made
        node.meta["val"] = made
        for place, t in tensors.items():
            self.keep(t, self.graph.call_function(operator.getitem, (node, place)))
        return made


def graph_of(function: Callable[..., Sequence[torch.Tensor]], given: Sequence[torch.Tensor]) -> Graph:
    """The graph of a call. Values of nodes are in meta["val"]. Raises ForwardDeclined where more decides than tensors
    that are given, and whatever the function raises."""
    recording = _Recording()
    if recording.mode is None:
        raise ForwardDeclined("this torch does not say what is called")
    for place, t in enumerate(given):
        recording.keep(t, recording.graph.placeholder(f"given_{place}"))
    with recording.mode:
        made = function(*given)
    recording.graph.output([recording.node(t) for t in made])
    return recording.graph
