"""The computation of softmax and its logarithm."""

from dataclasses import dataclass

from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import TensorParameter, like
from graphfuse.torch.operators.by_rule import ByRule
from graphfuse.torch.operators.computation import TYPES, gradient_of


@dataclass(frozen=True)
class Softmax(ByRule):
    """Softmax of x over the last dimension, or its logarithm. Backward reads what was returned."""

    log: bool = False
    numbers = ()
    kept = ("y",)
    normalized = TensorParameter("y", TYPES, like("dy"), free=True)  # with any strides
    gradients = (gradient_of("x", "dy"),)

    def _forward(self, d: GraphBuilder) -> None:
        op = d.graph.log_softmax if self.log else d.graph.softmax
        d.store("y", op(d["x"]))
