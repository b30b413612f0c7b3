"""The computation of a norm on each side of a residual sum, rounded wherever the three steps round."""

from dataclasses import dataclass

from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.tensor_parameter import TensorParameter, columns
from graphfuse.torch.operators.computation import (
    DX,
    INVERSE_RMS,
    RESIDUAL,
    TOTAL,
    TYPES,
    Computation,
    X,
    Y,
    gradient_of,
    of_rows,
)

WEIGHTS = tuple(TensorParameter(n, TYPES, columns("x"), optional=True) for n in ("weight", "next_weight"))


@dataclass(frozen=True)
class NormAddNorm(Computation):
    """total = RMSNorm(x) * weight + residual, and y = RMSNorm(total) * next_weight.

    The first norm is rounded to x's type and total to residual's, and each is read so by what follows, unlike in
    ``graphfuse.functional.sandwich_rmsnorm``. zero_centred, rounded: as of ``Norm``, for both norms.
    """

    zero_centred: bool = False
    rounded: bool = False
    tensors = (X, RESIDUAL, *WEIGHTS)
    numbers = ("eps", "next_eps")
    results = (Y, TOTAL)
    statistics = (INVERSE_RMS, of_rows("next_inverse_rms", written=True))
    kept = ("x", "total", "weight", "next_weight", "inverse_rms", "next_inverse_rms")
    gradients = (DX, gradient_of("residual", "total"), *(gradient_of(a.name, over_rows="sum") for a in WEIGHTS))
    summands = ("x", "residual", "weight")

    def _forward(self, d: DrawnGraph) -> None:
        kind = {"zero_centred": self.zero_centred, "rounded": "x" if self.rounded else None}
        inner = d.norm(d["x"], **kind, statistics=("inverse_rms",))
        total = d.graph.add(d.rounded(inner, "x"), d["residual"])
        d.store("total", total)
        d.store("y", d.norm(total, "next_weight", eps="next_eps", **kind, statistics=("next_inverse_rms",)))
