"""The computation of a norm, as data: with a residual sum, a bias, SiLU and a gate."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.tensor_parameter import TensorParameter
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.computation import (
    BIAS,
    DBIAS,
    DGATE,
    DRESIDUAL,
    DWEIGHT,
    DX,
    GATE,
    INVERSE_RMS,
    INVERSE_STD,
    MEAN,
    RESIDUAL,
    TOTAL,
    WEIGHT,
    Computation,
    X,
    Y,
    normal_again,
)


@dataclass(frozen=True)
class Norm(Computation):
    """RMSNorm of x, or of x + residual, times weight or weight + 1, plus bias, or then SiLU, then times gate.

    centred: layer norm instead of RMSNorm.
    rounded: the norm is rounded to x's type before it is multiplied by weight; its gradients are those of the norm that
        is not.

    weight and bias are one number for each column, or for each head and column. The sum is returned, too, and
    normalized as it is stored, so that backward, which reads it, is of what was computed.
    """

    residual: bool = False
    zero_centred: bool = False
    silu: bool = False
    gate: bool = False
    bias: bool = False
    centred: bool = False
    rounded: bool = False

    @cached_property
    def tensors(self) -> tuple[TensorParameter, ...]:
        return X, *(RESIDUAL,) * self.residual, *(GATE,) * self.gate, WEIGHT, *(BIAS,) * self.bias

    @cached_property
    def results(self) -> tuple[TensorParameter, ...]:
        return Y, *(TOTAL,) * self.residual

    @cached_property
    def statistics(self) -> tuple[TensorParameter, ...]:
        return (MEAN, INVERSE_STD) if self.centred else (INVERSE_RMS,)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        normalized = "total" if self.residual else "x"
        return (normalized, *("gate",) * self.gate, "weight", *(a.name for a in self.statistics))

    @cached_property
    def gradients(self) -> tuple[TensorParameter, ...]:
        return DX, *(DRESIDUAL,) * self.residual, *(DGATE,) * self.gate, DWEIGHT, *(DBIAS,) * self.bias

    def summed(self, d: DrawnGraph) -> Tensor:
        """Tensor that is normalized."""
        if not self.residual:
            return d["x"]
        total = d.graph.add(d["x"], d["residual"])
        d.store("total", total)
        return total

    def finish(self, d: DrawnGraph, y: Tensor) -> None:
        """Store y, which has weight and bias, after SiLU and gate."""
        y = d.graph.swish(y) if self.silu else y
        d.store("y", d.graph.mul(y, d["gate"]) if self.gate else y)

    def before_activation(self, d: DrawnGraph, y: Callable[[], Tensor]) -> Tensor:
        """dy, taken back through gate and SiLU. y: draws what SiLU is of."""
        grad = d.graph.mul(d["dy"], d["gate"]) if self.gate else d["dy"]
        return d.graph.swish_backward(grad, y()) if self.silu else grad

    def store_gradients(self, d: DrawnGraph, dx: Tensor) -> None:
        """Store the gradients of the terms of what is normalized, with that of the sum itself."""
        sums = [name for name in ("dx", "dresidual") if name in d]
        if sums and "dtotal" in d:
            dx = d.graph.add(dx, d["dtotal"])
        for name in sums:
            d.store(name, dx) if len(sums) == 1 else d.store_read(name, dx)

    def _forward(self, d: DrawnGraph) -> None:
        rounded, statistics = "x" if self.rounded else None, [a.name for a in self.statistics]
        kind = {"centred": self.centred, "zero_centred": self.zero_centred}
        self.finish(d, d.norm(self.summed(d), **kind, rounded=rounded, statistics=statistics))

    def _backward(self, d: DrawnGraph) -> None:
        graph, dy = d.graph, d["dy"]
        sums = {"dx", "dresidual"} & d.layouts.keys()
        # The kernel of the backward adds up columns of all rows, for a weight that is the same for all.
        apart = d.is_of_heads() or "weight" not in d
        scale = d.weight(zero_centred=self.zero_centred) if self.silu or sums or not apart else None
        if self.silu:
            y = normal_again(d, d["x"])
            y = y if scale is None else graph.mul(y, scale)
            if "dgate" in d:
                d.store("dgate", graph.mul(dy, graph.swish(y)))
        if not sums and not {"dweight", "dbias"} & d.layouts.keys():
            return
        grad = self.before_activation(d, lambda: y)
        if apart:
            if "dweight" in d:
                d.store_sum("dweight", graph.mul(grad, normal_again(d, d["x"])))
            if "dbias" in d:
                d.store_sum("dbias", grad)
            if not sums:
                return
            grad, scale = grad if scale is None else graph.mul(grad, scale), None
        if self.centred:
            dx, *found = graph.layernorm_backward(grad, d["x"], scale, d["mean"], d["inverse_std"])
        else:
            has_dbias = "dbias" in d and not apart
            dx, *found = graph.rmsnorm_backward(grad, d["x"], scale, d["inverse_rms"], has_dbias=has_dbias)
        for name, t in zip(("dweight", "dbias"), found, strict=True):
            if name in d and t is not None:
                d.store(name, t)
        self.store_gradients(d, dx)
