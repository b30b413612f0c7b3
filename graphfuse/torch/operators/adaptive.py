"""The computation of adaptive layer norm."""

from dataclasses import dataclass

from graphfuse.functional import adaptive
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import TensorParameter, like, samples
from graphfuse.torch.operators.by_rule import ByRule
from graphfuse.torch.operators.computation import DX, INVERSE_STD, MEAN, TYPES, X, gradient_of, sum_of

SCALE, SHIFT = TensorParameter("scale", TYPES, samples("x")), TensorParameter("shift", TYPES, like("scale"))


@dataclass(frozen=True)
class AdaLayerNorm(ByRule):
    """Layer norm of x, times scale + 1, plus shift. scale and shift have a row for each sample, one for all rows, or
    one for each row."""

    tensors = (X, SCALE, SHIFT)
    statistics = (MEAN, INVERSE_STD)
    kept = ("x", "scale", "mean", "inverse_std")
    gradients = (DX, gradient_of("scale", over_rows="sum"), sum_of("shift", like("scale")))

    def _forward(self, d: GraphBuilder) -> None:
        y = d.norm(d["x"], None, centred=True, statistics=("mean", "inverse_std"))
        d.store("y", adaptive.modulated(d, y))
