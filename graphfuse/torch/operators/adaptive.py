"""The computation of adaptive layer norm, and of a residual sum, gated for each sample, with the norm of it."""

from dataclasses import dataclass

from graphfuse.functional import adaptive
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.tensor_parameter import TensorParameter, like, samples
from graphfuse.torch.operators.computation import (
    DX,
    INVERSE_STD,
    MEAN,
    RESIDUAL,
    TOTAL,
    TYPES,
    Computation,
    X,
    Y,
    gradient_of,
    sum_of,
)

SCALE, SHIFT = TensorParameter("scale", TYPES, samples("x")), TensorParameter("shift", TYPES, like("scale"))
GATE = TensorParameter("gate", TYPES, samples("x"), optional=True)


@dataclass(frozen=True)
class AdaLayerNorm(Computation):
    """Layer norm of x, times scale + 1, plus shift: of a row of these for each sample, for all rows, or for each."""

    tensors = (X, SCALE, SHIFT)
    statistics = (MEAN, INVERSE_STD)
    kept = ("x", "scale", "mean", "inverse_std")
    gradients = (DX, gradient_of("scale", over_rows="sum"), sum_of("shift", like("scale")))

    def _forward(self, d: DrawnGraph) -> None:
        y = d.norm(d["x"], None, centred=True, statistics=("mean", "inverse_std"))
        d.store("y", adaptive.modulated(d, y))


@dataclass(frozen=True)
class AddAdaLayerNorm(Computation):
    """total = x * gate + residual, and y = layer norm of total * (scale + 1) + shift, as
    ``graphfuse.functional.add_adalayernorm``: the sum is normalized before it is rounded, so that backward makes it
    again. gate: None for 1."""

    tensors = (X, RESIDUAL, SCALE, SHIFT, GATE)
    results = (Y, TOTAL)
    statistics = (MEAN, INVERSE_STD)
    kept = ("x", "residual", "scale", "gate", "mean", "inverse_std")
    gradients = (
        DX,
        gradient_of("residual"),
        gradient_of("scale", over_rows="sum"),
        sum_of("shift", like("scale")),
        gradient_of("gate", over_rows="sum"),
    )
    summands = ("x", "residual", "gate")

    def _forward(self, d: DrawnGraph) -> None:
        adaptive.added("x", "total", "y", ("mean", "inverse_std"))(d)
