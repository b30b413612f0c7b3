"""The computation of RMSNorm with a gate that is activated, as state-space and linear-attention layers have it."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from graphfuse.enums import norm_forward_phase, reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.tensor_parameter import TensorParameter
from graphfuse.tensor import Tensor
from graphfuse.torch.norm import DGATE, DWEIGHT, DX, DY, GATE, INVERSE_RMS, NORMALIZED, WEIGHT, X, Y, of_rows


@dataclass(frozen=True)
class GatedNorm:
    """RMSNorm of x times weight or weight + 1, times an activation of gate; or RMSNorm of x times that activation.

    gate_first: the second of these. sigmoid: the activation, in place of SiLU. rounded: the norm is rounded to x's type
    before it is multiplied by weight, and again before it is multiplied by the activated gate; gradients are those of
    the norm that is not. weight is one number for each column, or for each head and column.
    """

    gate_first: bool = False
    sigmoid: bool = False
    zero_centred: bool = False
    rounded: bool = False
    tensors: ClassVar[tuple[TensorParameter, ...]] = (X, GATE, WEIGHT)
    numbers: ClassVar[tuple[str, ...]] = ("eps",)
    results: ClassVar[tuple[TensorParameter, ...]] = (Y,)
    statistics: ClassVar[tuple[TensorParameter, ...]] = (INVERSE_RMS,)
    kept: ClassVar[tuple[str, ...]] = ("x", "gate", "weight", "inverse_rms")
    gradients: ClassVar[tuple[TensorParameter, ...]] = (DX, DGATE, DWEIGHT)
    residual: ClassVar[bool] = False

    @cached_property
    def inference(self) -> Variant:
        return Variant((*self.tensors, Y), self._forward)

    @cached_property
    def training(self) -> Variant:
        return Variant((*self.tensors, Y, *self.statistics), self._forward)

    @cached_property
    def backward(self) -> Variant:
        saved = (of_rows(a.name) for a in self.statistics)
        return Variant((DY, NORMALIZED, GATE, WEIGHT, *saved, *self.gradients), self._backward)

    def _forward(self, d: Drawing) -> None:
        graph, scale, training = d.graph, self._scale(d), "inverse_rms" in d
        x = graph.mul(d["x"], self._activated(d)) if self.gate_first else d["x"]
        apart = scale is not None and (self.rounded or _of_heads(d))
        y, inverse = graph.rmsnorm(
            x,
            scale=None if apart else scale,  # the axes along which a scale varies would be normalized together
            epsilon=d.number("eps"),
            norm_forward_phase=norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE,
        )
        if training:
            d.store("inverse_rms", inverse)
        if apart:
            y = graph.mul(d.rounded(y, "x") if self.rounded else y, scale)
        if not self.gate_first:
            y = graph.mul(d.rounded(y, "x") if self.rounded else y, self._activated(d))
        d.store("y", y)

    def _backward(self, d: Drawing) -> None:
        """What is not asked for is not drawn."""
        graph, dy = d.graph, d["dy"]
        opened = graph.sigmoid(d["gate"])
        activated = opened if self.sigmoid else graph.mul(d["gate"], opened)
        normalized = graph.mul(d["x"], activated) if self.gate_first else d["x"]
        if not self.gate_first:
            if "dgate" in d:
                y = self._weighted(d, graph.mul(normalized, d["inverse_rms"]))
                d.store("dgate", graph.mul(graph.mul(self._slope(d, opened, activated), y), dy))
            if not {"dx", "dweight"} & d.layouts.keys():
                return
            dy = graph.mul(dy, activated)
        goes_on = "dx" in d or self.gate_first and "dgate" in d
        apart = _of_heads(d)
        if "dweight" in d and (apart or not goes_on):
            shape = d.layouts["dweight"].shape
            along = graph.mul(dy, graph.mul(normalized, d["inverse_rms"]))
            total = graph.reduction(along, mode=reduction_mode.ADD)
            d.store("dweight", total.set_dim((1,) * (d.rank - len(shape)) + shape))
        if not goes_on:
            return
        dy, scale = (self._weighted(d, dy), None) if apart else (dy, self._scale(d))
        dnormalized, *found = graph.rmsnorm_backward(dy, normalized, scale, d["inverse_rms"], has_dbias=False)
        if "dweight" in d and not apart:
            d.store("dweight", found[0])
        if self.gate_first and "dgate" in d:
            d.store("dgate", graph.mul(graph.mul(dnormalized, d["x"]), self._slope(d, opened, activated)))
        if "dx" in d:
            d.store("dx", graph.mul(dnormalized, activated) if self.gate_first else dnormalized)

    def _slope(self, d: Drawing, opened: Tensor, activated: Tensor) -> Tensor:
        """The derivative of the activation, of what backward makes anyway: kernels fuse what hangs together."""
        closed = d.graph.mul(d.graph.sub(1.0, opened), activated)
        return closed if self.sigmoid else d.graph.add(closed, opened)

    def _scale(self, d: Drawing) -> Tensor | None:
        if "weight" not in d:
            return None
        return d.graph.add(d["weight"], 1.0) if self.zero_centred else d["weight"]

    def _weighted(self, d: Drawing, values: Tensor) -> Tensor:
        scale = self._scale(d)
        return values if scale is None else d.graph.mul(values, scale)

    def _activated(self, d: Drawing) -> Tensor:
        return d.graph.sigmoid(d["gate"]) if self.sigmoid else d.graph.swish(d["gate"])


def _of_heads(d: Drawing) -> bool:
    return "weight" in d and len(d.layouts["weight"].shape) > 1
