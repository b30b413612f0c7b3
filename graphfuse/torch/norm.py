"""What an operator computes, as data, and the graphs of it: inference, training phase, gradients."""

from dataclasses import dataclass
from functools import cached_property

import torch

from graphfuse.dtypes import data_type
from graphfuse.functional.argument import FLOATS, Argument, columns, like, rows, type_of, types
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.tensor import Tensor

TYPES = FLOATS | types(data_type.DOUBLE)
STATISTICS = types(data_type.FLOAT, data_type.DOUBLE)


def _statistics(tensors) -> torch.dtype:
    """The type that is computed in: gradients are as exact as results."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


X = Argument("x", TYPES)
RESIDUAL = Argument("residual", TYPES, like("x"))
WEIGHT = Argument("weight", TYPES, columns("x"), optional=True)
GATE = Argument("gate", TYPES, like("x"))
Y = Argument("y", TYPES, like("x"), written=True, new=type_of("x"))
TOTAL = Argument("total", TYPES, like("x"), written=True, new=type_of("residual"))
INVERSE_RMS = Argument("inverse_rms", STATISTICS, rows("x"), written=True, new=_statistics)

# Of the backward graph, where x is the tensor that was normalized: the residual sum, if there is one.
DY = Argument("dy", TYPES)
NORMALIZED = Argument("x", TYPES, like("dy"), free=True)  # in strides of its own
SAVED_INVERSE_RMS = Argument("inverse_rms", STATISTICS, rows("x"))
DTOTAL = Argument("dtotal", TYPES, like("x"), optional=True)
DX = Argument(
    "dx", TYPES, like("x"), written=True, new=type_of("dy"), asked="needs_dx"
)  # dy has y's type, which is x's
DRESIDUAL = Argument("dresidual", TYPES, like("x"), written=True, new=type_of("x"), asked="needs_dresidual")
DWEIGHT = Argument("dweight", TYPES, columns("x"), written=True, new=type_of("weight"), asked="needs_dweight")
DGATE = Argument("dgate", TYPES, like("x"), written=True, new=type_of("gate"), asked="needs_dgate")


@dataclass(frozen=True)
class Norm:
    """RMSNorm of x, or of x + residual, times weight or weight + 1, then SiLU, then times gate.

    The sum is returned, too, and normalized as it is stored, so that backward, which reads it, is of what was
    computed.
    """

    residual: bool = False
    zero_centred: bool = False
    silu: bool = False
    gate: bool = False

    @cached_property
    def tensors(self) -> tuple[Argument, ...]:
        """What an operator takes."""
        return X, *(RESIDUAL,) * self.residual, *(GATE,) * self.gate, WEIGHT

    @cached_property
    def results(self) -> tuple[Argument, ...]:
        return Y, *(TOTAL,) * self.residual

    @cached_property
    def inference(self) -> Variant:
        return Variant((*self.tensors, *self.results), self._forward)

    @cached_property
    def training(self) -> Variant:
        return Variant((*self.tensors, *self.results, INVERSE_RMS), self._forward)

    @cached_property
    def backward(self) -> Variant:
        read = (DY, NORMALIZED, *(GATE,) * self.gate, WEIGHT, SAVED_INVERSE_RMS, *(DTOTAL,) * self.residual)
        return Variant((*read, *self.gradients), self._backward)

    @cached_property
    def gradients(self) -> tuple[Argument, ...]:
        """Those of `tensors`, in their order."""
        return DX, *(DRESIDUAL,) * self.residual, *(DGATE,) * self.gate, DWEIGHT

    def _scale(self, d: Drawing) -> Tensor | None:
        if "weight" not in d:
            return None
        return d.graph.add(d["weight"], 1.0) if self.zero_centred else d["weight"]

    def _forward(self, d: Drawing) -> None:
        x = d["x"]
        if self.residual:
            x = d.graph.add(x, d["residual"])
            d.store("total", x)
        if "inverse_rms" in d:
            y, inverse = d.training_norm(x, self._scale(d))
            d.store("inverse_rms", inverse)
        else:
            y = d.norm(x, self._scale(d))
        if self.silu:
            y = d.graph.swish(y)
        d.store("y", d.graph.mul(y, d["gate"]) if self.gate else y)

    def _backward(self, d: Drawing) -> None:
        graph, grad, x, inverse, scale = d.graph, d["dy"], d["x"], d["inverse_rms"], self._scale(d)
        sums = [name for name in ("dx", "dresidual") if name in d]
        if self.silu:
            y = graph.mul(x, inverse)
            y = y if scale is None else graph.mul(y, scale)
            if "dgate" in d:
                d.store("dgate", graph.mul(grad, graph.swish(y)))
        if not sums and "dweight" not in d:
            return
        if self.gate:
            grad = graph.mul(grad, d["gate"])
        if self.silu:
            grad = graph.swish_backward(grad, y)
        dx, dweight, _ = graph.rmsnorm_backward(grad, x, scale, inverse, has_dbias=False)
        if "dweight" in d:
            d.store("dweight", dweight)
        if sums and "dtotal" in d:
            dx = graph.add(dx, d["dtotal"])
        for name in sums:  # an output that is read would be read as stored
            d.store(name, dx if len(sums) == 1 else graph.identity(dx))
