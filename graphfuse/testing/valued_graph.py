"""Graphs with values: memory contents before an engine runs, and faults of the contents after it."""

from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor
from graphfuse.testing import reference, storage


class ValuedGraph:
    """A graph with values. given: those of inputs. near, wide: those of every tensor, computed in the nodes' types and
    in float64."""

    def __init__(self, torch, graph: FrozenGraph, seed: int):
        self._torch, self._graph = torch, graph
        self.given = reference.inputs(torch, graph, seed)
        self.wide, self.near = (reference.evaluated(torch, graph, self.given, w) for w in (True, False))

    def memory(self, t: FrozenTensor, known: bool) -> bytes:
        """The bytes of a tensor, with its values if they are `known`."""
        return storage.stored(self._torch, t, self.near[t.id] if known else None)

    def number(self, t: FrozenTensor) -> float:
        """The value of a tensor that is passed by value."""
        return float(self.near[t.id].reshape(-1)[0])

    def fault(self, t: FrozenTensor, content: bytes, tolerance: float, shared: bool = False) -> str | None:
        """Fault of a tensor with these bytes; None if there is none. shared: whether another tensor occupies its
        gaps."""
        between = 0 if shared else storage.written_between(self._torch, t, content)
        if between:
            return f"{t}: {between} bytes between its elements were written"
        found = storage.loaded(self._torch, t, content)
        return reference.difference(self._torch, self._graph, t, found, self.wide[t.id], self.near[t.id], tolerance)
