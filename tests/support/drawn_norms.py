"""Norms that models have and no operator computes, drawn by hand as operators' graphs are: with a gate that is
activated, on both sides of a residual sum, and of length 1."""

from dataclasses import dataclass, replace

from graphfuse.base.enums import norm_forward_phase, reduction_mode
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import TensorParameter, columns
from graphfuse.torch.operators.by_rule import ByRule
from graphfuse.torch.operators.computation import (
    DGATE,
    DWEIGHT,
    DX,
    GATE,
    INVERSE_RMS,
    RESIDUAL,
    TOTAL,
    TYPES,
    WEIGHT,
    X,
    Y,
    gradient_of,
    of_rows,
)


@dataclass(frozen=True)
class GatedNorm(ByRule):
    """RMSNorm of x times weight or weight + 1, times an activation of gate; or RMSNorm of x times that activation.

    gate_first: the second of these. sigmoid: the activation, in place of SiLU. rounded: the norm is rounded to x's type
    before it is multiplied by weight, and again before it is multiplied by the activated gate.
    """

    gate_first: bool = False
    sigmoid: bool = False
    zero_centred: bool = False
    rounded: bool = False
    tensors = (X, GATE, WEIGHT)
    statistics = (INVERSE_RMS,)
    kept = ("x", "gate", "weight", "inverse_rms")
    gradients = (DX, DGATE, DWEIGHT)

    def _forward(self, d: GraphBuilder) -> None:
        rounded = "x" if self.rounded else None
        gate = d.graph.sigmoid if self.sigmoid else d.graph.swish
        x = d.graph.mul(d["x"], gate(d["gate"])) if self.gate_first else d["x"]
        y = d.norm(x, zero_centred=self.zero_centred, rounded=rounded, statistics=("inverse_rms",))
        if not self.gate_first:
            y = d.graph.mul(d.rounded(y, "x") if rounded else y, gate(d["gate"]))
        d.store("y", y)


WEIGHTS = tuple(TensorParameter(n, TYPES, columns("x"), optional=True) for n in ("weight", "next_weight"))


@dataclass(frozen=True)
class NormAddNorm(ByRule):
    """total = RMSNorm(x) * weight + residual, and y = RMSNorm(total) * next_weight, rounded wherever the three steps
    round. zero_centred, rounded: as of ``GatedNorm``, for both norms."""

    zero_centred: bool = False
    rounded: bool = False
    tensors = (X, RESIDUAL, *WEIGHTS)
    numbers = ("eps", "next_eps")
    results = (Y, TOTAL)
    statistics = (INVERSE_RMS, of_rows("next_inverse_rms", written=True))
    kept = ("x", "total", "weight", "next_weight", "inverse_rms", "next_inverse_rms")
    gradients = (DX, gradient_of("residual", "total"), *(gradient_of(a.name, over_rows="sum") for a in WEIGHTS))
    shared = passed = {}

    def _forward(self, d: GraphBuilder) -> None:
        total = d.graph.add(d.rounded(self._norm(d, d["x"], ""), "x"), d["residual"])
        d.store("total", total)
        d.store("y", self._norm(d, total, "next_"))

    def _norm(self, d: GraphBuilder, x, prefix: str):
        scale, statistic = d.weight(f"{prefix}weight", self.zero_centred), f"{prefix}inverse_rms"
        phase = norm_forward_phase.TRAINING if statistic in d else norm_forward_phase.INFERENCE
        given = None if self.rounded else scale
        y, *made = d.graph.rmsnorm(x, scale=given, epsilon=d.number(f"{prefix}eps"), norm_forward_phase=phase)
        for t in made if statistic in d else ():
            d.store(statistic, t)
        return d.scaled(y, scale, None, "x") if self.rounded else y


@dataclass(frozen=True)
class UnitNorm(ByRule):
    """x / max(length, eps) * factor * weight, each step rounded to x's type. rounded: the length is rounded, too."""

    rounded: bool = False
    tensors = (X, TensorParameter("weight", TYPES, columns("x"), optional=True))
    results = (replace(Y, strides="x"),)

    def _forward(self, d: GraphBuilder) -> None:
        graph, length = d.graph, d.by_rows(d["x"], reduction_mode.NORM2)
        length = d.rounded(length, "x") if self.rounded else length
        y = d.rounded(graph.div(d["x"], graph.max(length, d.number("eps"))), "x")
        y = graph.mul(y, d.number("factor"))
        d.store("y", graph.mul(d.rounded(y, "x"), d["weight"]))
