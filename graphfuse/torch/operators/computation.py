"""Description of what a differentiable operator computes: its tensors, and its graphs for inference, training and
gradients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from graphfuse.base.dtypes import data_type
from graphfuse.functional.declaration import Variant
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import (
    FLOATS,
    Rule,
    TensorParameter,
    columns_or_heads,
    like,
    like_or_columns,
    rows,
    type_of,
    types,
)

TYPES = FLOATS | types(data_type.DOUBLE)
STATISTICS = types(data_type.FLOAT, data_type.DOUBLE)


def type_computed_in(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Type that is computed in: float64 if a tensor is float64, otherwise float32. Gradients are as exact as
    results."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def gradient_of(name: str, of: str | None = None, **kind: object) -> TensorParameter:
    """The gradient of a tensor, made if requested. of: the tensor that has its shape and type. kind: other fields,
    which override these."""
    of = of or name
    fields = {"types": TYPES, "shape": like(of), "new": type_of(of), "asked": f"needs_d{name}", "written": True}
    return TensorParameter(f"d{name}", **(fields | kind))


def sum_of(name: str, shape: Rule) -> TensorParameter:
    """The gradient of a tensor that is added to all rows, in the type that is computed in. The tensor is not kept for
    backward, and autograd converts the sum to its type."""
    return gradient_of(name, types=STATISTICS, shape=shape, new=type_computed_in, over_rows="sum")


def of_rows(name: str, written: bool = False, of: str = "x") -> TensorParameter:
    """One number for each row of a tensor."""
    return TensorParameter(name, STATISTICS, rows(of), written=written, new=type_computed_in if written else None)


X = TensorParameter("x", TYPES)
RESIDUAL = TensorParameter("residual", TYPES, like("x"))
WEIGHT = TensorParameter("weight", TYPES, columns_or_heads("x"), optional=True)
BIAS = TensorParameter("bias", TYPES, like_or_columns("weight", "x"))
GATE = TensorParameter("gate", TYPES, like("x"))
Y = TensorParameter("y", TYPES, like("x"), written=True, new=type_of("x"))
TOTAL = TensorParameter("total", TYPES, like("x"), written=True, new=type_of("residual"))
SUM = ("x", "residual")
"""Terms of TOTAL: both have the same gradient."""
INVERSE_RMS, MEAN, INVERSE_STD = (of_rows(name, written=True) for name in ("inverse_rms", "mean", "inverse_std"))

# Arguments of the backward graph. There x is the tensor that was normalized: the residual sum, if there is one.
DY = TensorParameter("dy", TYPES)
NORMALIZED = TensorParameter("x", TYPES, like("dy"), free=True)  # with any strides
DTOTAL = TensorParameter("dtotal", TYPES, like("x"), optional=True)
DX = gradient_of("x", new=type_of("dy"))  # dy has y's type, which is x's
DRESIDUAL, DGATE = gradient_of("residual", "x"), gradient_of("gate")
DWEIGHT, DBIAS = gradient_of("weight", over_rows="sum"), sum_of("bias", like_or_columns("weight", "x"))


class Computation:
    """Computation of an operator. A subclass has the data, and draws the forward and the backward graph."""

    tensors: Sequence[TensorParameter] = (X,)
    """Tensors that the operator takes."""
    numbers: Sequence[str] = ("eps",)
    """Numbers after the tensors."""
    numbers_kept: Sequence[str] = ()
    """Those of `numbers` that backward reads, too."""
    options: Sequence[str] = ()
    """Arguments after the numbers. Each choice of them has its own graphs."""
    results: Sequence[TensorParameter] = (Y,)
    """Tensors that the operator returns."""
    statistics: Sequence[TensorParameter] = ()
    """Tensors that the training phase makes for backward, in addition to `results`."""
    kept: Sequence[str]
    """Names of those of all these tensors that backward reads."""
    normalized: TensorParameter = NORMALIZED
    """The first of `kept`, as backward reads it."""
    gradients: Sequence[TensorParameter | None]
    """Gradients of `tensors` that backward makes, in the order of `tensors`; None for a tensor without one."""
    as_given: Mapping[str, str] = {}
    """By the name of a tensor, the name of a result's gradient that is always the tensor's gradient, too."""

    @cached_property
    def inference(self) -> Variant:
        return Variant((*self.tensors, *self.results), self._forward)

    @cached_property
    def training(self) -> Variant:
        return Variant((*self.tensors, *self.results, *self.statistics), self._forward)

    @cached_property
    def backward(self) -> Variant:
        read = (*self.read_backward, *(DTOTAL,) * (TOTAL in self.results))
        return Variant((*read, *(a for a in self.gradients if a is not None)), self._backward)

    @property
    def read_backward(self) -> tuple[TensorParameter, ...]:
        """Arguments that the backward graph reads: dy, and what is kept."""
        given = {a.name: replace(a, written=False, new=None) for a in (*self.tensors, *self.results, *self.statistics)}
        return (DY, self.normalized, *(given[name] for name in self.kept[1:]))

    @property
    def differentiated(self) -> tuple[TensorParameter, ...]:
        """Tensors that have a gradient."""
        pairs = zip(self.tensors, self.gradients, strict=True)
        return tuple(a for a, grad in pairs if grad is not None or a.name in self.as_given)

    @property
    def incoming(self) -> tuple[str | None, ...]:
        """Names of the gradients of `results` that backward reads; None for a result without one."""
        return ("dy", "dtotal")[: len(self.results)]

    @property
    def sources(self) -> Mapping[str, Collection[str]]:
        """Names of those of `differentiated` that a result depends on, by the name of the result."""
        every = tuple(a.name for a in self.differentiated)
        return {a.name: SUM if a is TOTAL else every for a in self.results}

    @property
    def shared(self) -> Mapping[tuple[str, ...], str]:
        """Names of tensors that share one gradient, as terms of a sum do, and the condition that their types are equal,
        as Python code of what backward reads."""
        return {SUM: "dy.dtype == total.dtype"} if TOTAL in self.results else {}

    @property
    def passed(self) -> Mapping[str, Collection[str]]:
        """Names of all that a result depends on, by the name of the result, if its gradient is unchanged theirs."""
        return {"total": SUM} if TOTAL in self.results else {}

    @property
    def read(self) -> tuple[str, ...]:
        """Names of what backward reads, in its order, with gradients of results. The first of ``kept`` has its name in
        ``kept``."""
        names = (a.name for a in self.backward.arguments if not a.written)
        return tuple(self.kept[0] if name == self.normalized.name else name for name in names)

    def _forward(self, d: GraphBuilder) -> None:
        raise NotImplementedError

    def _backward(self, d: GraphBuilder) -> None:
        raise NotImplementedError
