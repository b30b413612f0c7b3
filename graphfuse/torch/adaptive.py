"""The computation of adaptive layer norm: the graphs forward and backward, and that of a residual sum, gated for each
sample, with the norm of it, which is forward alone."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from graphfuse.enums import norm_forward_phase, reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.tensor_parameter import Shape, TensorParameter, like, samples, type_of
from graphfuse.tensor import Tensor
from graphfuse.torch.norm import (
    DX,
    DY,
    INVERSE_STD,
    MEAN,
    NORMALIZED,
    RESIDUAL,
    STATISTICS,
    TOTAL,
    TYPES,
    X,
    Y,
    of_rows,
    type_computed_in,
)

SCALE, SHIFT = TensorParameter("scale", TYPES, samples("x")), TensorParameter("shift", TYPES, like("scale"))
DSCALE = TensorParameter(
    "dscale", TYPES, like("scale"), written=True, new=type_of("scale"), asked="needs_dscale", over_rows="sum"
)
GATE = TensorParameter("gate", TYPES, samples("x"), optional=True)
# In the type that is computed in: shift is not kept, and autograd converts the sum to its type.
DSHIFT = TensorParameter(
    "dshift", STATISTICS, like("scale"), written=True, new=type_computed_in, asked="needs_dshift", over_rows="sum"
)


@dataclass(frozen=True)
class AdaLayerNorm:
    """Layer norm of x, times scale + 1, plus shift: of a row of these for each sample, for all rows, or for each."""

    tensors: ClassVar[tuple[TensorParameter, ...]] = (X, SCALE, SHIFT)
    numbers: ClassVar[tuple[str, ...]] = ("eps",)
    results: ClassVar[tuple[TensorParameter, ...]] = (Y,)
    statistics: ClassVar[tuple[TensorParameter, ...]] = (MEAN, INVERSE_STD)
    kept: ClassVar[tuple[str, ...]] = ("x", "scale", "mean", "inverse_std")
    gradients: ClassVar[tuple[TensorParameter, ...]] = (DX, DSCALE, DSHIFT)
    residual: ClassVar[bool] = False

    @cached_property
    def inference(self) -> Variant:
        return Variant((*self.tensors, *self.results), self._forward)

    @cached_property
    def training(self) -> Variant:
        return Variant((*self.tensors, *self.results, *self.statistics), self._forward)

    @cached_property
    def backward(self) -> Variant:
        saved = (of_rows(a.name) for a in self.statistics)
        return Variant((DY, NORMALIZED, SCALE, *saved, *self.gradients), self._backward)

    def _forward(self, d: Drawing) -> None:
        training = self.statistics[0].name in d
        phase = norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE
        y, *statistics = d.graph.layernorm(d["x"], None, None, d.number("eps"), norm_forward_phase=phase)
        if training:
            for a, t in zip(self.statistics, statistics, strict=True):
                d.store(a.name, t)
        d.store("y", _adapted(d, y))

    def _backward(self, d: Drawing) -> None:
        graph, grad, extents = d.graph, d["dy"], _extents(d)
        # The kernel of the backward adds up columns of all rows, for a scale that is the same for all.
        apart = any(e != 1 for e in extents[:-1])
        if apart:
            if "dscale" in d:
                normal = graph.mul(graph.sub(d["x"], d["mean"]), d["inverse_std"])
                d.store("dscale", _sum(d, extents, graph.mul(grad, normal)))
            if "dshift" in d:
                d.store("dshift", _sum(d, extents, grad))
            if "dx" not in d:
                return
            grad = graph.mul(grad, graph.add(d["scale"], 1.0))
        scale = None if apart else graph.add(d["scale"], 1.0)
        for name, t in zip(
            ("dx", "dscale", "dshift"),
            graph.layernorm_backward(grad, d["x"], scale, d["mean"], d["inverse_std"]),
            strict=True,
        ):
            if name in d and t is not None:
                d.store(name, t)


def added() -> Variant:
    """total = x * gate + residual, and y = layer norm of total * (scale + 1) + shift, as
    ``graphfuse.functional.add_adalayernorm``: the sum is normalized before it is rounded. gate: None for 1."""

    def draw(d: Drawing) -> None:
        x = d.graph.mul(d["x"], d["gate"]) if "gate" in d else d["x"]
        total = d.graph.add(x, d["residual"])
        d.store("total", d.graph.identity(total))  # an output that is read would be read as stored
        y, *_ = d.graph.layernorm(total, None, None, d.number("eps"), norm_forward_phase=norm_forward_phase.INFERENCE)
        d.store("y", _adapted(d, y))

    return Variant((X, RESIDUAL, SCALE, SHIFT, GATE, Y, TOTAL), draw)


def _adapted(d: Drawing, y: Tensor) -> Tensor:
    return d.graph.add(d.graph.mul(y, d.graph.add(d["scale"], 1.0)), d["shift"])


def _extents(d: Drawing) -> Shape:
    """Those of scale, at the rank of x."""
    shape = d.layouts["scale"].shape
    return (*(1,) * (d.rank - len(shape)), *shape)


def _sum(d: Drawing, extents: Shape, values: Tensor) -> Tensor:
    """Sums over the rows that share a scale; of one row each, values themselves."""
    if extents == d.layouts["x"].shape:
        return d.graph.identity(values)
    return d.graph.reduction(values, mode=reduction_mode.ADD).set_dim(extents)
