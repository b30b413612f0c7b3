"""Rows of length 1, scaled: RMSNorm as the VAE of WAN writes it, with ``torch.nn.functional.normalize``."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.operator import LIBRARY
from graphfuse.functional.tensor_parameter import TensorParameter, columns
from graphfuse.torch.operators.computation import DX, TYPES, Computation, X, Y, gradient_of, of_rows, sum_of
from graphfuse.torch.operators.formula import Operator, differentiable

WEIGHT, BIAS = (TensorParameter(name, TYPES, columns("x"), optional=True) for name in ("weight", "bias"))
NUMBERS = ("eps", "factor", "dim")


@dataclass(frozen=True)
class UnitNorm(Computation):
    """x / max(length, eps) * factor * weight + bias, or then SiLU; each step rounded to x's type, as torch's are.

    rounded: whether the length is rounded, too, as where ``normalize`` gets x in half precision. Gradients are those of
    steps that are not rounded.
    """

    rounded: bool = False
    silu: bool = False
    tensors = (X, WEIGHT, BIAS)
    numbers = numbers_kept = ("eps", "factor")
    results = (replace(Y, strides="x"),)
    statistics = (of_rows("length", written=True),)
    gradients = (
        replace(DX, strides="x"),
        gradient_of("weight", over_rows="sum"),
        sum_of("bias", columns("x")),
    )

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return ("x", "weight", *("bias",) * self.silu, "length")

    def _forward(self, d: DrawnGraph) -> None:
        graph, x = d.graph, d["x"]
        length = d.by_rows(x, reduction_mode.NORM2)
        is_kept = "length" in d
        if is_kept:
            d.store("length", length)
        if self.rounded:
            length = d.rounded(graph.identity(length) if is_kept else length, "x")  # what is kept is not rounded
        y = d.rounded(graph.div(x, graph.max(length, d.number("eps"))), "x")
        y = graph.mul(y, d.number("factor"))
        for name, step in (("weight", graph.mul), ("bias", graph.add)):
            if name in d:
                y = step(d.rounded(y, "x"), d[name])
        d.store("y", graph.swish(d.rounded(y, "x")) if self.silu else y)


def unit_norm(name: str, rounded: bool = False, silu: bool = False) -> Operator:
    """The operator ``graphfuse::NAME`` of x, weight, bias, eps, factor, dim, made of ``graphfuse::NAME_rows``.

    x: a full tensor, of which rows lie along the dimension dim. weight, bias: a number for each place along it, or
    None. Returns a tensor of x's shape in x's strides, where x is dense: nothing is copied for another dimension than
    the last. The gradient of x has them, too.
    """
    rows = differentiable(f"{name}_rows", UnitNorm(rounded, silu))

    def run(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        factor: float,
        dim: int,
    ) -> torch.Tensor:
        return rows.run(x.movedim(dim, -1), weight, bias, eps, factor).movedim(-1, dim)

    LIBRARY.define(f"{name}(Tensor x, Tensor? weight, Tensor? bias, float eps, float factor, int dim) -> Tensor")
    # One that is implicit has a decomposition, which inductor does not accept of an operator that a pass puts there.
    for key in ("Autograd", "CompositeExplicitAutograd"):
        LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"graphfuse::{name}", lambda x, *others: torch.empty_like(x), lib=LIBRARY)
    return replace(rows, run=run)
