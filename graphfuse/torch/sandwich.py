"""A norm on each side of a residual sum, in one kernel, rounded wherever the three steps round."""

from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.tensor_parameter import TensorParameter, columns
from graphfuse.tensor import Tensor
from graphfuse.torch.computation import RESIDUAL, TOTAL, TYPES, X, Y

WEIGHT, NEXT_WEIGHT = (TensorParameter(n, TYPES, columns("x"), optional=True) for n in ("weight", "next_weight"))
NUMBERS = ("eps", "next_eps")


def sandwich(zero_centred: bool = False, rounded: bool = False) -> Variant:
    """total = RMSNorm(x) * weight + residual, and y = RMSNorm(total) * next_weight.

    The first norm is rounded to x's type and total to residual's, and each is read so by what follows, unlike in
    ``graphfuse.functional.sandwich_rmsnorm``. zero_centred, rounded: as of ``Norm``, for both norms.
    """

    def norm(d: Drawing, x: Tensor, weight: str, eps: str) -> Tensor:
        scale = d.weight(weight, zero_centred)
        if not rounded or scale is None:
            return d.norm(x, scale, eps=eps)
        return d.graph.mul(d.rounded(d.norm(x, None, eps=eps), "x"), scale)

    def draw(d: Drawing) -> None:
        total = d.graph.add(d.rounded(norm(d, d["x"], "weight", "eps"), "x"), d["residual"])
        d.store("total", total)
        d.store("y", norm(d, total, "next_weight", "next_eps"))

    return Variant((X, RESIDUAL, WEIGHT, NEXT_WEIGHT, Y, TOTAL), draw)
