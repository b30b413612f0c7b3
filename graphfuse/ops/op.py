"""The fields of an entry of the op table: all that is known of one kind of node."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from graphfuse.dtypes import data_type

Shape = tuple[int, ...]
Stride = tuple[int, ...]
Attributes = Mapping[str, object]


class Cost(enum.Enum):
    """What the scalar form of a pointwise op takes."""

    COPY = "nothing: its operand is its result"
    ARITHMETIC = "an addition, a multiplication or a choice, or two"
    FUNCTION = "a division, or the call of a function"


@dataclass(frozen=True)
class Port:
    """An input or output of an op.

    dtype: what an output gets when the user sets none; None for what the graph says of all tensors. label: what cuDNN
    calls it in the name that an output has until the user sets one, None where that is `name`. over_rows: an output
    that is a sum over all rows, so that nothing of it is known before all of them are done. kept: an output of which
    some is written, and the rest stays as it is in memory; references get that by the port's name. moved: an input
    whose values the output, of which there is one, has. numbers: an input of row numbers. References get numbers as
    they are stored where float32 does not hold all values of their type, and what is moved or kept as values of the
    output's type, likewise.
    """

    name: str
    optional: bool = False
    dtype: data_type | None = None
    label: str | None = None
    over_rows: bool = False
    kept: bool = False
    moved: bool = False
    numbers: bool = False


@dataclass(frozen=True)
class Attribute:
    """A compile-time parameter of a node: its name, accepted types and default.

    several: a sequence of values of these types, which is kept as a tuple; None, where that is the default, for none.
    """

    name: str
    types: tuple[type, ...]
    default: object = None
    required: bool = False
    several: bool = False


@dataclass(frozen=True)
class Op:
    """One kind of node.

    infer(shapes by input port, attributes, shapes that the user set by output port) ->
    shapes by output port; raises GraphValidationError with a message that the caller
    prefixes with the node. stored(attributes) -> the data types of output ports that are
    stored as nothing else, the default first. frozen(attributes, shapes by input port,
    (shape, data type) by output port) -> the attributes of the frozen node: those given,
    and what they leave to how its tensors are set up.
    reference(t, inputs by port, frozen attributes) -> outputs by port, on float tensors
    broadcast as torch does. cuda: for pointwise ops, a C++ expression of float
    with {port} and {attribute} slots; cost: what that takes; note: how exact it is, where users
    may want to know. commutative: the operands may be swapped. absent(attributes, input ports
    given): output ports not written. order: what errors say about arguments by position, where
    cuDNN's order differs. strides(shape, attributes, strides by input port) -> the strides of an output of which
    users set none; None for those of the first input of its shape, without gaps. not_offered: options of cuDNN's that
    are known by name, each with the one value that is accepted beside None.
    """

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    infer: Callable[[Mapping[str, Shape], Attributes, Mapping[str, Shape]], Mapping[str, Shape]]
    reference: Callable[..., Mapping[str, object]]
    attributes: tuple[Attribute, ...] = ()
    cuda: str | None = None
    cost: Cost | None = None
    note: str = ""
    commutative: bool = False
    absent: Callable[[Attributes, frozenset[str]], frozenset[str]] = lambda attributes, inputs: frozenset()
    stored: Callable[[Attributes], Mapping[str, tuple[data_type, ...]]] = lambda attributes: {}
    frozen: Callable[..., Attributes] = lambda attributes, inputs, outputs: attributes
    order: str = ""
    strides: Callable[[Shape, Attributes, Mapping[str, Stride]], Stride] | None = None
    not_offered: tuple[tuple[str, object], ...] = ()

    @property
    def pointwise(self) -> bool:
        return self.cuda is not None

    @cached_property
    def moved(self) -> tuple[str, ...]:
        """The inputs whose values the outputs have."""
        return tuple(port.name for port in self.inputs if port.moved)

    @cached_property
    def exact(self) -> tuple[str, ...]:
        """The inputs that are not read in the compute type."""
        return tuple(port.name for port in self.inputs if port.moved or port.numbers)

    def keeps(self, output: str) -> bool:
        """Whether an output port keeps what the node does not write."""
        return any(port.kept for port in self.outputs if port.name == output)


@dataclass(frozen=True)
class Spelling:
    """Another of cuDNN's names for a node of `op`. parameters: cuDNN's name -> the op's, of the ports and attributes
    that it takes, all of which must be given."""

    name: str
    doc: str
    op: str
    parameters: tuple[tuple[str, str], ...]
