"""The computation of a norm, as data: with a residual sum, a bias, SiLU and a gate."""

from dataclasses import dataclass
from functools import cached_property

from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import TensorParameter
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.by_rule import ByRule
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
    X,
    Y,
)


@dataclass(frozen=True)
class Norm(ByRule):
    """RMSNorm of x, or of x + residual, times weight or weight + 1, plus bias, then optionally SiLU, then optionally
    times gate.

    centred: layer norm instead of RMSNorm.
    rounded: the norm is rounded to x's type before it is multiplied by weight. Its gradients are those of the unrounded
    norm.

    weight and bias are one number for each column, or for each head and column. The residual sum is returned, too. It
    is normalized as it is stored, as backward reads it in that form.
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

    def summed(self, d: GraphBuilder) -> Tensor:
        """Tensor that is normalized. A residual sum is stored."""
        if not self.residual:
            return d["x"]
        total = d.graph.add(d["x"], d["residual"])
        d.store("total", total)
        return total

    def finish(self, d: GraphBuilder, y: Tensor) -> None:
        """Apply SiLU and gate to y, and store it. y: the norm with weight and bias."""
        y = d.graph.swish(y) if self.silu else y
        d.store("y", d.graph.mul(y, d["gate"]) if self.gate else y)

    def _forward(self, d: GraphBuilder) -> None:
        rounded, statistics = "x" if self.rounded else None, [a.name for a in self.statistics]
        kind = {"centred": self.centred, "zero_centred": self.zero_centred}
        self.finish(d, d.norm(self.summed(d), **kind, rounded=rounded, statistics=statistics))
