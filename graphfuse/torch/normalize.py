"""The computation of L2 normalization: the graph forward and the graph backward."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from graphfuse.enums import reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.tensor_parameter import TensorParameter
from graphfuse.tensor import Tensor
from graphfuse.torch.norm import DX, DY, NORMALIZED, X, Y, of_rows

INVERSE_LENGTH, IS_LONG = (of_rows(name, written=True) for name in ("inverse_length", "is_long"))


@dataclass(frozen=True)
class Normalize:
    """x / max(length, eps), the length that of a row. is_long: 1 where eps is not taken for it, else 0."""

    tensors: ClassVar[tuple[TensorParameter, ...]] = (X,)
    numbers: ClassVar[tuple[str, ...]] = ("eps",)
    results: ClassVar[tuple[TensorParameter, ...]] = (Y,)
    statistics: ClassVar[tuple[TensorParameter, ...]] = (INVERSE_LENGTH, IS_LONG)
    kept: ClassVar[tuple[str, ...]] = ("x", "inverse_length", "is_long")
    gradients: ClassVar[tuple[TensorParameter, ...]] = (DX,)
    residual: ClassVar[bool] = False

    @cached_property
    def inference(self) -> Variant:
        return Variant((X, Y), self._forward)

    @cached_property
    def training(self) -> Variant:
        return Variant((X, Y, *self.statistics), self._forward)

    @cached_property
    def backward(self) -> Variant:
        saved = (of_rows(a.name) for a in self.statistics)
        return Variant((DY, NORMALIZED, *saved, DX), self._backward)

    def _forward(self, d: Drawing) -> None:
        graph, x, eps = d.graph, d["x"], d.number("eps")
        length = _of_rows(d, graph.reduction(x, mode=reduction_mode.NORM2))
        taken = graph.max(length, eps)
        d.store("y", graph.div(x, taken))
        if "is_long" in d:
            d.store("inverse_length", graph.reciprocal(taken))
            d.store("is_long", graph.cmp_ge(length, eps))

    def _backward(self, d: Drawing) -> None:
        """inverse_length * (dy - y * sum(dy * y)), without the sum where the length was eps, which is a constant."""
        graph = d.graph
        y = graph.mul(d["x"], d["inverse_length"])
        along = graph.mul(_of_rows(d, graph.reduction(graph.mul(d["dy"], y), mode=reduction_mode.ADD)), d["is_long"])
        d.store("dx", graph.mul(graph.sub(d["dy"], graph.mul(y, along)), d["inverse_length"]))


def _of_rows(d: Drawing, t: Tensor) -> Tensor:
    return t.set_dim((*next(iter(d.layouts.values())).shape[:-1], 1))
