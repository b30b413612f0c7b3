"""Steps of straight-line programs, and their operands: what a fused kernel applies to each value.

``rows.program`` has programs of steps, ``codegen.expressions`` prints them.
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
    """A one-element tensor operand: by value from the host, or read from device memory
    at an address that is a multiple of alignment bytes."""

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
    """The number of an element in its row, from 0: an operand of pointwise steps. It is exact up to `MOST_COLUMNS`.
    integer: whether the step reads it as an integer."""

    integer: bool = False


@dataclass(frozen=True)
class RowNumber:
    """The number of an element's row, from 0: an operand of pointwise steps with columns, which read an integer."""


MOST_COLUMNS = 2**24
"""float32 has all integers up to this."""

Operand = Chain | Load | Scalar | Number | Column | RowNumber


@dataclass(frozen=True)
class Step:
    """One op with its operands by port. rounded: the type that its result is rounded to, None for float32. exact:
    whether it is of that type as it is. narrow: whether all operands have values of that type."""

    op_name: str
    operands: tuple[tuple[str, Operand], ...]
    attributes: tuple[tuple[str, object], ...] = ()
    rounded: data_type | None = None
    exact: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class Reduce:
    """A step that makes one value of each row: all elements of `input`, joined. rounded: as of ``Step``."""

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
    """A step that makes one value of each row: its element in the column numbered `column`, of which there is one a
    row; 0 where no column has that number. rounded: as of ``Step``."""

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

Shorter = tuple[tuple[AnyStep, ...], dict[Operand, Operand]] | None
"""Other steps in the place of some, and by the old values the new ones; None where nothing changes."""


def operands_of(steps: Sequence[AnyStep], o: Operand, op_name: str) -> dict[str, Operand]:
    """The operands of the step that makes a value, if it is of this op and does not round; else none."""
    step = steps[o.index] if isinstance(o, Chain) else None
    return dict(step.operands) if step is not None and step.op_name == op_name and step.rounded is None else {}


def renamed(step: AnyStep, moved: Mapping[Operand, Operand]) -> AnyStep:
    """The step with new operands in the place of old ones."""
    if isinstance(step, Reduce):
        return replace(step, input=moved.get(step.input, step.input))
    if isinstance(step, Pick):
        return replace(step, column=moved.get(step.column, step.column))
    operands = tuple((port, moved.get(o, o)) for port, o in step.operands)
    return step if operands == step.operands else replace(step, operands=operands)
