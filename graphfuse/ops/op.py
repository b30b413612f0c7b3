"""The fields of an entry of the op table: all that is known of one kind of node."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from graphfuse.base.dtypes import data_type
from graphfuse.ops.expansion import Expansion
from graphfuse.ops.pullback import UNKNOWN, NoRule, Rule

Shape = tuple[int, ...]
Stride = tuple[int, ...]
Attributes = Mapping[str, object]

OFFSETS = ".ragged_offset"
"""Behind the name of a port, that of the frozen node's input that has the ragged offsets of the tensor there."""


class Cost(enum.Enum):
    """Cost of a pointwise op's scalar form."""

    COPY = "nothing: its operand is its result"
    ARITHMETIC = "an addition, a multiplication or a choice, or two"
    FUNCTION = "a division, or the call of a function"


@dataclass(frozen=True)
class Port:
    """An input or output of an op.

    References get inputs as values of the compute type; row numbers as they are stored where float32 does not hold all
    values of their type; and what is moved or kept as values of the output's type, likewise.
    """

    name: str
    optional: bool = False
    dtype: data_type | None = None  # of an output of which the user sets none; None for the graph's own
    label: str | None = None  # cuDNN's word for it in the name of an output without one; None where that is `name`
    over_rows: bool = False  # an output that is a sum over all rows: nothing of it is known before all of them are done
    kept: bool = False  # an output of which some is written; the rest stays, and references get it by the port's name
    moved: bool = False  # an input whose values the output, of which there is one, has
    numbers: bool = False  # an input of row numbers
    by_name: bool = False  # an input that is given by its name alone, as cuDNN has it
    declared: bool = False  # an input that is read as the type that its tensor declares, whatever the graph rounds
    given: bool = False  # an output whose tensor users give by the port's name, and that is made only then
    # The flag that has to be set where batches of the tensor begin at ragged offsets; "" where they never do.
    ragged: str = ""
    scales: str = ""  # the frozen attribute that names the axis of blocks, of which this has an element each
    # The types that an input may have; which it is, the frozen node says by an attribute of the port's name + "_type",
    # unless these are row numbers.
    types: tuple[data_type, ...] = ()


integers = partial(Port, numbers=True, types=(data_type.INT32, data_type.INT64))
"""Port of lengths, offsets or numbers of rows."""


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
    """One kind of node."""

    name: str
    doc: str
    inputs: tuple[Port, ...]
    # (shapes by input port, attributes, shapes that the user set by output port) -> shapes by output port. The message
    # of its GraphValidationError gets the node as prefix.
    infer: Callable[[Mapping[str, Shape], Attributes, Mapping[str, Shape]], Mapping[str, Shape]]
    outputs: tuple[Port, ...] = (Port("output", label="OUT_0"),)
    # (t, inputs by port, frozen attributes) -> outputs by port, on float tensors broadcast as torch does. Of an op with
    # an expansion it is that, computed in torch.
    reference: Callable[..., Mapping[str, object]] | None = None
    # (inputs by port, frozen attributes, rows that each batch has by ragged port) -> None; VariantPackError for numbers
    # in memory that cannot be. Called where these are on the CPU.
    check: Callable[..., None] | None = None
    expansion: Expansion | None = None
    elsewhere: str = ""  # why torch cannot compute it of one process's tensors, of an op that has neither
    attributes: tuple[Attribute, ...] = ()
    cuda: str | None = None  # of a pointwise op: a C++ expression of float with slots {port} and {attribute}
    # Cheaper expressions by the data type that operands have values of and the result is rounded to: of the same bits.
    narrow: Mapping[data_type, str] = field(default_factory=dict)
    packed: str | None = None  # the same of pieces in a type of 16 bits, as a C++ function of the first two inputs
    cost: Cost | None = None  # what the first takes
    note: str = ""  # how exact that is, where users may want to know
    commutative: bool = False  # the operands may be swapped
    # (attributes, input ports given) -> output ports not written.
    absent: Callable[[Attributes, frozenset[str]], frozenset[str]] = lambda attributes, inputs: frozenset()
    # (attributes) -> the data types of output ports that are stored as nothing else, the default first.
    stored: Callable[[Attributes], Mapping[str, tuple[data_type, ...]]] = lambda attributes: {}
    # (attributes, shapes by input port, (shape, data type) by output port) -> the attributes of the frozen node: those
    # given, and what they leave to how its tensors are set up.
    frozen: Callable[..., Attributes] = lambda attributes, inputs, outputs: attributes
    order: str = ""  # what errors say about arguments by position, where cuDNN's order differs
    # (shape, attributes, strides by input port) -> the strides of an output of which users set none; None for those of
    # the first input of its shape, without gaps.
    strides: Callable[[Shape, Attributes, Mapping[str, Stride]], Stride] | None = None
    # By parameter the ports and attributes that a tuple given for it stands for, in each form; "" for what is unused.
    tuples: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    # cuDNN's options, some of them attributes, that are taken where they ask for nothing: the value beside None that
    # does, and what takes the place of any other or why nothing does.
    not_offered: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    # Arguments that are functions of the graph and a tensor, and what draws nodes instead where one is given.
    functions: tuple[str, ...] = ()
    by_nodes: Callable[..., list[Any]] | None = None
    # By input port the rule that draws its gradient, or why there is none; one reason where it holds for all of them.
    vjp: Mapping[str, Rule | NoRule] | NoRule = UNKNOWN
    # By output port how backward makes it of inputs and of the outputs that are kept, where that is not the node again.
    again: Mapping[str, Rule] = field(default_factory=dict)
    # Attributes that a node whose gradient is wanted has in place of the user's.
    training: Attributes = field(default_factory=dict)
    integers: bool = False  # whether nodes may compute in INT32, modulo 2^32
    chooses: tuple[str, ...] = ()  # inputs of which each element of the output is one, or its magnitude or negative
    recomputed: bool = True  # whether backward may compute the node again
    # What it is called in aten, operators that compute the same. Each is written as the operator's name and overload
    # (behind "graphfuse::" one of ours), a space, then its parameters: "other:b" for one that is the port or attribute
    # b, "alpha=1" for one that must have this value. One that is not written must have its default.
    aten: tuple[str, ...] = ()

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The outputs whose tensors users give."""
        return tuple(port.name for port in self.outputs if port.given)

    @cached_property
    def unasked(self) -> Mapping[str, object]:
        """Options that are no attributes, each as it is where it asks for nothing."""
        own = {a.name for a in self.attributes}
        refused = {name: nothing for name, (nothing, _) in self.not_offered.items() if name not in own}
        return {**dict.fromkeys(self.functions), **refused}

    @cached_property
    def by_name(self) -> tuple[str, ...]:
        """The inputs that are given by their names alone."""
        return tuple(port.name for port in self.inputs if port.by_name)

    @cached_property
    def returned(self) -> tuple[Port, ...]:
        """The outputs whose tensors a node makes."""
        return tuple(port for port in self.outputs if not port.given)

    @property
    def pointwise(self) -> bool:
        return self.cuda is not None

    @cached_property
    def moved(self) -> tuple[str, ...]:
        """The inputs whose values the outputs have."""
        return tuple(port.name for port in self.inputs if port.moved)

    @cached_property
    def ragged(self) -> Mapping[str, str]:
        """Flags that have to be set, by the ports whose batches then may begin at ragged offsets."""
        return {port.name: port.ragged for port in (*self.inputs, *self.outputs) if port.ragged}

    @cached_property
    def offsets(self) -> frozenset[str]:
        """Input ports of ragged offsets, of nodes whose tensors have them."""
        return frozenset(f"{port}{OFFSETS}" for port in self.ragged)

    @cached_property
    def exact(self) -> tuple[str, ...]:
        """The inputs that are not read in the compute type."""
        return (*(port.name for port in self.inputs if port.moved or port.numbers), *self.offsets)

    def rule(self, port: str) -> Rule | NoRule:
        """Rule that draws the gradient of an input port, or why there is none."""
        return self.vjp if isinstance(self.vjp, NoRule) else self.vjp.get(port, UNKNOWN)

    def keeps(self, output: str) -> bool:
        """True if an output port keeps what the node does not write."""
        return any(port.kept for port in self.outputs if port.name == output)


@dataclass(frozen=True)
class Spelling:
    """Another of cuDNN's names for a node of `op`. parameters: cuDNN's name -> the op's, of the ports and attributes
    that it takes, all of which must be given; None where it takes what the op's own method does."""

    name: str
    doc: str
    op: str
    parameters: tuple[tuple[str, str], ...] | None = None
