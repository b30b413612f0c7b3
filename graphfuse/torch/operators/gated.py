"""The computation of RMSNorm with a gate that is activated, as state-space and linear-attention layers have it."""

from dataclasses import dataclass

from graphfuse.functional.drawing import DrawnGraph
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.computation import DGATE, DWEIGHT, DX, GATE, INVERSE_RMS, WEIGHT, Computation, X


@dataclass(frozen=True)
class GatedNorm(Computation):
    """RMSNorm of x times weight or weight + 1, times an activation of gate; or RMSNorm of x times that activation.

    gate_first: the second of these. sigmoid: the activation, in place of SiLU. rounded: the norm is rounded to x's type
    before it is multiplied by weight, and again before it is multiplied by the activated gate; gradients are those of
    the norm that is not. weight is one number for each column, or for each head and column.
    """

    gate_first: bool = False
    sigmoid: bool = False
    zero_centred: bool = False
    rounded: bool = False
    tensors = (X, GATE, WEIGHT)
    statistics = (INVERSE_RMS,)
    kept = ("x", "gate", "weight", "inverse_rms")
    gradients = (DX, DGATE, DWEIGHT)

    def _forward(self, d: DrawnGraph) -> None:
        weight, rounded = d.weight(zero_centred=self.zero_centred), "x" if self.rounded else None
        x = d.graph.mul(d["x"], self._activated(d)) if self.gate_first else d["x"]
        y = d.norm(x, weight, rounded=rounded, statistics=("inverse_rms",))
        if not self.gate_first:
            y = d.graph.mul(d.rounded(y, "x") if rounded else y, self._activated(d))
        d.store("y", y)

    def _activated(self, d: DrawnGraph) -> Tensor:
        return d.graph.sigmoid(d["gate"]) if self.sigmoid else d.graph.swish(d["gate"])
