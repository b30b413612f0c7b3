"""The computation of L2 normalization."""

from dataclasses import dataclass

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.torch.operators.computation import DX, Computation, of_rows


@dataclass(frozen=True)
class Normalize(Computation):
    """x / max(length, eps), the length that of a row. is_long: 1 where eps is not taken for it, else 0."""

    statistics = tuple(of_rows(name, written=True) for name in ("inverse_length", "is_long"))
    kept = ("x", "inverse_length", "is_long")
    gradients = (DX,)

    def _forward(self, d: DrawnGraph) -> None:
        graph, x, eps = d.graph, d["x"], d.number("eps")
        length = d.by_rows(x, reduction_mode.NORM2)
        taken = graph.max(length, eps)
        d.store("y", graph.div(x, taken))
        if "is_long" in d:
            d.store("inverse_length", graph.reciprocal(taken))
            d.store("is_long", graph.cmp_ge(length, eps))

    def _backward(self, d: DrawnGraph) -> None:
        """inverse_length * (dy - y * sum(dy * y)), without the sum where the length was eps, which is a constant."""
        graph = d.graph
        y = graph.mul(d["x"], d["inverse_length"])
        along = graph.mul(d.by_rows(graph.mul(d["dy"], y)), d["is_long"])
        d.store("dx", graph.mul(graph.sub(d["dy"], graph.mul(y, along)), d["inverse_length"]))
