"""The computation of L2 normalization."""

from dataclasses import dataclass

from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.softmax import of_unit_length
from graphfuse.torch.operators.by_rule import ByRule
from graphfuse.torch.operators.computation import DX, of_rows


@dataclass(frozen=True)
class Normalize(ByRule):
    """x / max(length, eps), where length is that of a row."""

    numbers_kept = ("eps",)
    statistics = (of_rows("length", written=True),)
    kept = ("x", "length")
    gradients = (DX,)

    def _forward(self, d: GraphBuilder) -> None:
        d.store("y", of_unit_length(d, d["x"]))
