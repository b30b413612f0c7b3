"""The computation of L2 normalization."""

from dataclasses import dataclass

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.torch.operators.computation import DX, Computation, of_rows


@dataclass(frozen=True)
class Normalize(Computation):
    """x / max(length, eps), the length that of a row."""

    numbers_kept = ("eps",)
    statistics = (of_rows("length", written=True),)
    kept = ("x", "length")
    gradients = (DX,)

    def _forward(self, d: DrawnGraph) -> None:
        length = d.by_rows(d["x"], reduction_mode.NORM2)
        if "length" in d:
            d.store("length", length)
        d.store("y", d.graph.div(d["x"], d.graph.max(length, d.number("eps"))))
