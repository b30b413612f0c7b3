"""Steps of row programs, and their operands.

``rows.program`` has the programs, ``codegen.expressions`` prints steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.ir import FrozenTensor, TensorId
from graphfuse.ops import Join


@dataclass(frozen=True)
class Chain:
    """An operand computed earlier: the result of step number `index`."""

    index: int


@dataclass(frozen=True)
class Scalar:
    """A one-element tensor, passed by value or read from device memory. alignment: of its address, in bytes."""

    tensor: TensorId
    name: str
    dtype: data_type
    by_value: bool
    alignment: int = 16

    @classmethod
    def of(cls, tensor: FrozenTensor) -> "Scalar":
        return cls(tensor.id, tensor.name, tensor.dtype, tensor.by_value, tensor.alignment)


@dataclass(frozen=True)
class Load:
    """An operand read from memory: input number `index` of the program."""

    index: int


@dataclass(frozen=True)
class Number:
    """An operand that is part of the kernel, rounded to float32."""

    value: float


@dataclass(frozen=True)
class Column:
    """The column number of each element, from 0, as operand of pointwise steps. It is exact up to `MOST_COLUMNS`.
    integer: whether the step reads it as an integer."""

    integer: bool = False


@dataclass(frozen=True)
class RowNumber:
    """The row number of each element, from 0, as an integer operand of pointwise steps with columns."""


MOST_COLUMNS = 2**24
"""float32 represents all integers up to this."""

Operand = Chain | Load | Scalar | Number | Column | RowNumber


@dataclass(frozen=True)
class Step:
    """One op with its operands by port. rounded: the type that the result is rounded to; None for float32. exact:
    whether rounding to it changes nothing. narrow: whether all operands have values of that type."""

    op_name: str
    operands: tuple[tuple[str, Operand], ...]
    attributes: tuple[tuple[str, object], ...] = ()
    rounded: data_type | None = None
    exact: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class Reduce:
    """A step that reduces all elements of a row of `input` to one value. rounded: as in ``Step``."""

    join: Join
    input: Operand
    rounded: data_type | None = None

    @property
    def op_name(self) -> str:
        return self.join.value

    @property
    def operands(self) -> tuple[tuple[str, Operand], ...]:
        return (("input", self.input),)


@dataclass(frozen=True)
class Pick:
    """A step that reads one element of each row, in column number `column`; 0 if there is no such column. Rows may
    differ in the number. rounded: as in ``Step``."""

    input: Load
    column: Operand
    rounded: data_type | None = None

    @property
    def op_name(self) -> str:
        return "row_element"

    @property
    def operands(self) -> tuple[tuple[str, Operand], ...]:
        return (("input", self.input), ("column", self.column))


AnyStep = Step | Reduce | Pick

Rewrite = tuple[tuple[AnyStep, ...], dict[Operand, Operand]] | None
"""New steps, and the new value for each old one; None if nothing changes."""


def operands_of(steps: Sequence[AnyStep], o: Operand, op_name: str) -> dict[str, Operand]:
    """The operands of the step that computes a value, if the step has this op and does not round; else empty."""
    step = steps[o.index] if isinstance(o, Chain) else None
    return dict(step.operands) if step is not None and step.op_name == op_name and step.rounded is None else {}


def renamed(step: AnyStep, moved: Mapping[Operand, Operand]) -> AnyStep:
    """The step with operands replaced. moved: old -> new."""
    if isinstance(step, Reduce):
        return replace(step, input=moved.get(step.input, step.input))
    if isinstance(step, Pick):
        return replace(step, column=moved.get(step.column, step.column))
    operands = tuple((port, moved.get(o, o)) for port, o in step.operands)
    return step if operands == step.operands else replace(step, operands=operands)
