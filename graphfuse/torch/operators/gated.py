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

    def _backward(self, d: DrawnGraph) -> None:
        graph, dy = d.graph, d["dy"]
        opened = graph.sigmoid(d["gate"])
        activated = opened if self.sigmoid else graph.mul(d["gate"], opened)
        normalized = graph.mul(d["x"], activated) if self.gate_first else d["x"]
        if not self.gate_first:
            if "dgate" in d:
                y = d.weighted(graph.mul(normalized, d["inverse_rms"]), self.zero_centred)
                d.store("dgate", graph.mul(graph.mul(self._slope(d, opened, activated), y), dy))
            if not {"dx", "dweight"} & d.layouts.keys():
                return
            dy = graph.mul(dy, activated)
        goes_on, apart = "dx" in d or self.gate_first and "dgate" in d, d.is_of_heads()
        if "dweight" in d and (apart or not goes_on):
            d.store_sum("dweight", graph.mul(dy, graph.mul(normalized, d["inverse_rms"])))
        if not goes_on:
            return
        dy, scale = (
            (d.weighted(dy, self.zero_centred), None) if apart else (dy, d.weight(zero_centred=self.zero_centred))
        )
        dnormalized, *found = graph.rmsnorm_backward(dy, normalized, scale, d["inverse_rms"], has_dbias=False)
        if "dweight" in d and not apart:
            d.store("dweight", found[0])
        if self.gate_first and "dgate" in d:
            d.store("dgate", graph.mul(graph.mul(dnormalized, d["x"]), self._slope(d, opened, activated)))
        if "dx" in d:
            d.store("dx", graph.mul(dnormalized, activated) if self.gate_first else dnormalized)

    def _slope(self, d: DrawnGraph, opened: Tensor, activated: Tensor) -> Tensor:
        """The derivative of the activation, of what backward makes anyway: kernels fuse what hangs together."""
        closed = d.graph.mul(d.graph.sub(1.0, opened), activated)
        return closed if self.sigmoid else d.graph.add(closed, opened)

    def _activated(self, d: DrawnGraph) -> Tensor:
        return d.graph.sigmoid(d["gate"]) if self.sigmoid else d.graph.swish(d["gate"])
