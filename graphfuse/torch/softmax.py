"""The computation of softmax and its logarithm: the graph forward and the graph backward."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.tensor_parameter import TensorParameter, like, type_of
from graphfuse.torch.norm import DY, TYPES, X, Y

MADE = TensorParameter("y", TYPES, like("dy"), free=True)  # of the backward graph, in strides of its own
DX = TensorParameter("dx", TYPES, like("dy"), written=True, new=type_of("dy"), asked="needs_dx")


@dataclass(frozen=True)
class Softmax:
    """Softmax of x over the last dimension, or its logarithm. Backward reads what was returned."""

    log: bool = False

    tensors: ClassVar[tuple[TensorParameter, ...]] = (X,)
    numbers: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[TensorParameter, ...]] = (Y,)
    statistics: ClassVar[tuple[TensorParameter, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ("y",)
    gradients: ClassVar[tuple[TensorParameter, ...]] = (DX,)
    residual: ClassVar[bool] = False

    @cached_property
    def inference(self) -> Variant:
        return Variant((X, Y), self._forward)

    @property
    def training(self) -> Variant:
        return self.inference

    @cached_property
    def backward(self) -> Variant:
        return Variant((DY, MADE, DX), self._backward)

    def _forward(self, d: Drawing) -> None:
        op = d.graph.log_softmax if self.log else d.graph.softmax
        d.store("y", op(d["x"]))

    def _backward(self, d: Drawing) -> None:
        op = d.graph.log_softmax_backward if self.log else d.graph.softmax_backward
        d.store("dx", op(d["dy"], d["y"]))
