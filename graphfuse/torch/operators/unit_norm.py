"""Rows of length 1, scaled: RMSNorm as the VAE of WAN writes it, with ``torch.nn.functional.normalize``."""

import torch

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.function import define
from graphfuse.functional.operator import LIBRARY, pass_by_autograd
from graphfuse.functional.tensor_parameter import TensorParameter, columns, like
from graphfuse.torch.operators.computation import TYPES, X
from graphfuse.torch.operators.forward_only import ForwardOnly
from graphfuse.torch.operators.step import called

WEIGHT, BIAS = (TensorParameter(name, TYPES, columns("x"), optional=True) for name in ("weight", "bias"))
Y = TensorParameter("y", TYPES, like("x"), written=True)
NUMBERS = ("eps", "factor", "dim")


def graph_of(rounded: bool = False, silu: bool = False) -> Variant:
    """x / max(length, eps) * factor * weight + bias, or then SiLU; each step rounded to x's type, as torch's are.

    rounded: whether the length is rounded, too, as where ``normalize`` gets x in half precision.
    """

    def draw(d: DrawnGraph) -> None:
        graph, x = d.graph, d["x"]
        length = d.by_rows(x, reduction_mode.NORM2)
        length = d.rounded(length, "x") if rounded else length
        y = d.rounded(graph.div(x, graph.max(length, d.number("eps"))), "x")
        y = graph.mul(y, d.number("factor"))
        for name, step in (("weight", graph.mul), ("bias", graph.add)):
            if name in d:
                y = step(d.rounded(y, "x"), d[name])
        d.store("y", graph.swish(d.rounded(y, "x")) if silu else y)

    return Variant((X, WEIGHT, BIAS, Y), draw)


def unit_norm(name: str, rounded: bool = False, silu: bool = False) -> ForwardOnly:
    """The operator ``graphfuse::NAME`` of x, weight, bias, eps, factor, dim.

    x: a full tensor, of which rows lie along the dimension dim. weight, bias: a number for each place along it, or
    None. Returns a tensor of x's shape in x's strides, where x is dense: nothing is copied for another dimension than
    the last.
    """
    variant = graph_of(rounded, silu)
    parameters = (*(a.name for a in variant.arguments), "eps", "factor")
    f = Function(f"{name}_rows", parameters, {"weight": None, "bias": None}, (), {(): variant}, ())
    rows = define(f)
    pass_by_autograd(f, getattr(torch.ops.graphfuse, f.name).default)

    def compute(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        factor: float,
        dim: int,
    ) -> torch.Tensor:
        y = torch.empty_like(x)
        rows(x.movedim(dim, -1), weight, bias, y.movedim(dim, -1), eps, factor)
        return y

    LIBRARY.define(f"{name}(Tensor x, Tensor? weight, Tensor? bias, float eps, float factor, int dim) -> Tensor")
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"graphfuse::{name}", lambda x, *others: torch.empty_like(x), lib=LIBRARY)
    return ForwardOnly(("x", "weight", "bias"), called(getattr(torch.ops.graphfuse, name).default, compute))
