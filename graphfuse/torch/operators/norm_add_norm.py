"""A norm on each side of a residual sum, in one kernel, rounded wherever the three steps round."""

from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.tensor_parameter import TensorParameter, columns
from graphfuse.torch.operators.computation import RESIDUAL, TOTAL, TYPES, X, Y

WEIGHT, NEXT_WEIGHT = (TensorParameter(n, TYPES, columns("x"), optional=True) for n in ("weight", "next_weight"))
NUMBERS = ("eps", "next_eps")


def norm_add_norm(zero_centred: bool = False, rounded: bool = False) -> Variant:
    """total = RMSNorm(x) * weight + residual, and y = RMSNorm(total) * next_weight.

    The first norm is rounded to x's type and total to residual's, and each is read so by what follows, unlike in
    ``graphfuse.functional.sandwich_rmsnorm``. zero_centred, rounded: as of ``Norm``, for both norms.
    """

    kind = {"zero_centred": zero_centred, "rounded": "x" if rounded else None}

    def draw(d: DrawnGraph) -> None:
        total = d.graph.add(d.rounded(d.norm(d["x"], **kind), "x"), d["residual"])
        d.store("total", total)
        d.store("y", d.norm(total, "next_weight", eps="next_eps", **kind))

    return Variant((X, RESIDUAL, WEIGHT, NEXT_WEIGHT, Y, TOTAL), draw)
