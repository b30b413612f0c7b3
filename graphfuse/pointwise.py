"""A straight-line program of pointwise ops on one element: what a fused kernel applies per value.

Value 0 is what the kernel hands in; value k is the result of step k - 1. The last
value is the result. Code generation prints it (``codegen.pointwise``).
"""

from dataclasses import dataclass

from graphfuse.dtypes import data_type
from graphfuse.ir import Tensor, TensorId


@dataclass(frozen=True)
class Chain:
    """An operand computed earlier: value number `index`."""

    index: int


@dataclass(frozen=True)
class Scalar:
    """A one-element tensor operand: by value from the host, or read from device memory
    at an address that is a multiple of alignment bytes."""

    tensor: TensorId
    name: str
    dtype: data_type
    by_value: bool
    alignment: int = 16

    @classmethod
    def of(cls, tensor: Tensor) -> "Scalar":
        return cls(tensor.id, tensor.name, tensor.dtype, tensor.by_value, tensor.alignment)


@dataclass(frozen=True)
class Step:
    """One op of the table with its operands by port."""

    op_name: str
    operands: tuple[tuple[str, Chain | Scalar], ...]
    attributes: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Program:
    """Steps in order; empty means the value is stored as it is."""

    steps: tuple[Step, ...] = ()

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The distinct scalar operands in order of first use."""
        found = (o for step in self.steps for _, o in step.operands if isinstance(o, Scalar))
        return tuple(dict.fromkeys(found))
