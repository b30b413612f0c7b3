"""The computation of adaptive layer norm, and that of a residual sum, gated for each sample, with the norm of it, which
is forward alone."""

from dataclasses import dataclass

from graphfuse.functional import adaptive
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.tensor_parameter import TensorParameter, like, samples
from graphfuse.op_graph.tensor import Tensor
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
    normal_again,
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

    def _backward(self, d: DrawnGraph) -> None:
        graph, grad = d.graph, d["dy"]
        # The kernel of the backward adds up columns of all rows, for a scale that is the same for all.
        apart = any(e != 1 for e in d.layouts["scale"].shape[:-1])
        if apart:
            if "dscale" in d:
                _store_sum(d, "dscale", graph.mul(grad, normal_again(d, d["x"])))
            if "dshift" in d:
                _store_sum(d, "dshift", grad)
            if "dx" not in d:
                return
            grad = graph.mul(grad, graph.add(d["scale"], 1.0))
        scale = None if apart else graph.add(d["scale"], 1.0)
        found = graph.layernorm_backward(grad, d["x"], scale, d["mean"], d["inverse_std"])
        for name, t in zip(("dx", "dscale", "dshift"), found, strict=True):
            if name in d and t is not None:
                d.store(name, t)


def _store_sum(d: DrawnGraph, name: str, values: Tensor) -> None:
    """Store sums over the rows that share a scale; of one row each, values themselves."""
    if d.layouts["scale"].shape == d.layouts["x"].shape:
        d.store_read(name, values)
    else:
        d.store_sum(name, values)


def added() -> Variant:
    """total = x * gate + residual, and y = layer norm of total * (scale + 1) + shift, as
    ``graphfuse.functional.add_adalayernorm``: the sum is normalized before it is rounded. gate: None for 1."""
    return Variant((X, RESIDUAL, SCALE, SHIFT, GATE, Y, TOTAL), adaptive.added("x", "total", "y"))
