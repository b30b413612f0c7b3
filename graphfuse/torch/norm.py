"""The computation of a norm, as data, and its graphs: inference, training phase, gradients."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase, reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.tensor_parameter import (
    FLOATS,
    TensorParameter,
    columns_or_heads,
    like,
    like_or_columns,
    rows,
    type_of,
    types,
)
from graphfuse.tensor import Tensor

TYPES = FLOATS | types(data_type.DOUBLE)
STATISTICS = types(data_type.FLOAT, data_type.DOUBLE)


def type_computed_in(tensors) -> torch.dtype:
    """The type that is computed in: gradients are as exact as results."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


X = TensorParameter("x", TYPES)
RESIDUAL = TensorParameter("residual", TYPES, like("x"))
WEIGHT = TensorParameter("weight", TYPES, columns_or_heads("x"), optional=True)
BIAS = TensorParameter("bias", TYPES, like_or_columns("weight", "x"))
GATE = TensorParameter("gate", TYPES, like("x"))
Y = TensorParameter("y", TYPES, like("x"), written=True, new=type_of("x"))
TOTAL = TensorParameter("total", TYPES, like("x"), written=True, new=type_of("residual"))


def of_rows(name: str, written: bool = False) -> TensorParameter:
    """One number a row."""
    return TensorParameter(name, STATISTICS, rows("x"), written=written, new=type_computed_in if written else None)


INVERSE_RMS, MEAN, INVERSE_STD = (of_rows(name, written=True) for name in ("inverse_rms", "mean", "inverse_std"))

# Of the backward graph, where x is the tensor that was normalized: the residual sum, if there is one.
DY = TensorParameter("dy", TYPES)
NORMALIZED = TensorParameter("x", TYPES, like("dy"), free=True)  # in strides of its own
DTOTAL = TensorParameter("dtotal", TYPES, like("x"), optional=True)
DX = TensorParameter(
    "dx", TYPES, like("x"), written=True, new=type_of("dy"), asked="needs_dx"
)  # dy has y's type, which is x's
DRESIDUAL = TensorParameter("dresidual", TYPES, like("x"), written=True, new=type_of("x"), asked="needs_dresidual")
DWEIGHT = TensorParameter(
    "dweight", TYPES, like("weight"), written=True, new=type_of("weight"), asked="needs_dweight", over_rows="sum"
)
# In the type that is computed in: bias is not kept, and autograd converts the sum to its type.
DBIAS = TensorParameter(
    "dbias",
    STATISTICS,
    like_or_columns("weight", "x"),
    written=True,
    new=type_computed_in,
    asked="needs_dbias",
    over_rows="sum",
)
DGATE = TensorParameter("dgate", TYPES, like("x"), written=True, new=type_of("gate"), asked="needs_dgate")


@dataclass(frozen=True)
class Norm:
    """RMSNorm of x, or of x + residual, times weight or weight + 1, plus bias, or then SiLU, then times gate. centred:
    layer norm instead of RMSNorm. rounded: the norm is rounded to x's type before it is multiplied by weight; its
    gradients are those of the norm that is not.

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
    numbers: ClassVar[tuple[str, ...]] = ("eps",)

    @cached_property
    def tensors(self) -> tuple[TensorParameter, ...]:
        """What an operator takes."""
        return X, *(RESIDUAL,) * self.residual, *(GATE,) * self.gate, WEIGHT, *(BIAS,) * self.bias

    @cached_property
    def results(self) -> tuple[TensorParameter, ...]:
        return Y, *(TOTAL,) * self.residual

    @cached_property
    def statistics(self) -> tuple[TensorParameter, ...]:
        """What the training phase makes of each row, as the graph's op returns it."""
        return (MEAN, INVERSE_STD) if self.centred else (INVERSE_RMS,)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """What backward reads beside gradients, in its order."""
        normalized = "total" if self.residual else "x"
        return (normalized, *("gate",) * self.gate, "weight", *(a.name for a in self.statistics))

    @cached_property
    def inference(self) -> Variant:
        return Variant((*self.tensors, *self.results), self._forward)

    @cached_property
    def training(self) -> Variant:
        return Variant((*self.tensors, *self.results, *self.statistics), self._forward)

    @cached_property
    def backward(self) -> Variant:
        saved = (of_rows(a.name) for a in self.statistics)
        read = (DY, NORMALIZED, *(GATE,) * self.gate, WEIGHT, *saved, *(DTOTAL,) * self.residual)
        return Variant((*read, *self.gradients), self._backward)

    @cached_property
    def gradients(self) -> tuple[TensorParameter, ...]:
        """Those of `tensors`, in their order."""
        return DX, *(DRESIDUAL,) * self.residual, *(DGATE,) * self.gate, DWEIGHT, *(DBIAS,) * self.bias

    def _scale(self, d: Drawing) -> Tensor | None:
        if "weight" not in d:
            return None
        return d.graph.add(d["weight"], 1.0) if self.zero_centred else d["weight"]

    def _normal(self, d: Drawing, x: Tensor) -> Tensor:
        """The norm of x, with weight and bias."""
        scale, bias = self._scale(d), d["bias"] if "bias" in d else None
        apart = _of_heads(d) or self.rounded and scale is not None
        training = self.statistics[0].name in d
        op = d.graph.layernorm if self.centred else d.graph.rmsnorm
        y, *statistics = op(
            x,
            scale=None if apart else scale,  # the axes along which a scale varies would be normalized together
            epsilon=d.number("eps"),
            bias=None if apart else bias,
            norm_forward_phase=norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE,
        )
        for a, t in zip(self.statistics, statistics, strict=True):
            if training:
                d.store(a.name, t)
        if not apart:
            return y
        y = d.graph.mul(d.rounded(y, "x") if self.rounded else y, scale)
        return y if bias is None else d.graph.add(y, bias)

    def _normal_again(self, d: Drawing) -> Tensor:
        """The norm without weight and bias, of what was kept."""
        if self.centred:
            return d.graph.mul(d.graph.sub(d["x"], d["mean"]), d["inverse_std"])
        return d.graph.mul(d["x"], d["inverse_rms"])

    def _forward(self, d: Drawing) -> None:
        x = d["x"]
        if self.residual:
            x = d.graph.add(x, d["residual"])
            d.store("total", x)
        y = self._normal(d, x)
        if self.silu:
            y = d.graph.swish(y)
        d.store("y", d.graph.mul(y, d["gate"]) if self.gate else y)

    def _backward(self, d: Drawing) -> None:
        graph, grad = d.graph, d["dy"]
        sums = [name for name in ("dx", "dresidual") if name in d]
        # The kernel of the backward adds up columns of all rows, for a weight that is the same for all.
        apart = _of_heads(d) or "weight" not in d
        # What nobody would read is not drawn.
        scale = self._scale(d) if self.silu or sums or not apart else None
        if self.silu:
            y = self._normal_again(d)
            y = y if scale is None else graph.mul(y, scale)
            if "dgate" in d:
                d.store("dgate", graph.mul(grad, graph.swish(y)))
        if not sums and not {"dweight", "dbias"} & d.layouts.keys():
            return
        if self.gate:
            grad = graph.mul(grad, d["gate"])
        if self.silu:
            grad = graph.swish_backward(grad, y)
        if apart:
            if "dweight" in d:
                _sum(d, "dweight", graph.mul(grad, self._normal_again(d)))
            if "dbias" in d:
                _sum(d, "dbias", grad)
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
        if sums and "dtotal" in d:
            dx = graph.add(dx, d["dtotal"])
        for name in sums:  # an output that is read would be read as stored
            d.store(name, dx if len(sums) == 1 else graph.identity(dx))


def _sum(d: Drawing, name: str, values: Tensor) -> None:
    """Sums over all rows, or over those of each head, which no kernel makes."""
    shape = d.layouts[name].shape
    d.store(name, d.graph.reduction(values, mode=reduction_mode.ADD).set_dim((1,) * (d.rank - len(shape)) + shape))


def _of_heads(d: Drawing) -> bool:
    return "weight" in d and len(d.layouts["weight"].shape) > 1
