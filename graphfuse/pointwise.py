"""A straight-line program of pointwise ops on one element: what a fused kernel applies per value.

In a `Program`, value 0 is what the kernel hands in, value k is the result of step k - 1 and the
last value is the result; ``codegen.pointwise`` prints it. Steps of programs that work on rows
read inputs, too (``rowwise``).
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
class Load:
    """An operand read from memory: input number `index` of a row program."""

    index: int


Operand = Chain | Load | Scalar


@dataclass(frozen=True)
class Step:
    """One op with its operands by port. rounded: the type that its result is rounded to, None for float32."""

    op_name: str
    operands: tuple[tuple[str, Operand], ...]
    attributes: tuple[tuple[str, object], ...] = ()
    rounded: data_type | None = None


@dataclass(frozen=True)
class Program:
    """Steps in order; empty means the value is stored as it is."""

    steps: tuple[Step, ...] = ()

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The distinct scalar operands in order of first use."""
        found = (o for step in self.steps for _, o in step.operands if isinstance(o, Scalar))
        return tuple(dict.fromkeys(found))
