"""`Op`, an entry of the op table, with all that is known about one kind of node."""

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
"""Suffix of a port's name for the frozen node's input with the ragged offsets of the port's tensor."""


class Cost(enum.Enum):
    """Cost of a pointwise op's scalar form."""

    COPY = "nothing: its operand is its result"
    ARITHMETIC = "an addition, a multiplication or a choice, or two"
    FUNCTION = "a division, or the call of a function"


@dataclass(frozen=True)
class Port:
    """An input or output of an op.

    References get inputs as values of the compute type. Exceptions are row numbers of types that float32 cannot
    represent, which they get as stored, and moved or kept values of such output types, which they get in that type.
    """

    name: str
    optional: bool = False
    dtype: data_type | None = None  # default of an output; None for the graph's type
    label: str | None = None  # cuDNN's port name in the name of an unnamed output; None if it is `name`
    over_rows: bool = False  # an output that is a sum over all rows, so that it is known only after all of them
    kept: bool = False  # an output that is written in part; references get its old value by the port's name
    moved: bool = False  # an input whose values are those of the only output
    numbers: bool = False  # an input of row numbers
    by_name: bool = False  # an input that is a keyword-only argument, as in cuDNN
    declared: bool = False  # an input that is read in the type that its tensor declares, whatever the rounding mode
    given: bool = False  # an output that is written only if users give a tensor for it, by the port's name
    # The attribute that must be set if batches of the tensor begin at ragged offsets; "" if that is not possible.
    ragged: str = ""
    scales: str = ""  # of a tensor of block scales: the frozen attribute with the axis of blocks
    # The types that an input may have. The frozen node has the actual one as attribute, the port's name + "_type",
    # except for row numbers.
    types: tuple[data_type, ...] = ()


integers = partial(Port, numbers=True, types=(data_type.INT32, data_type.INT64))
"""Makes a port of lengths, offsets or row numbers."""


@dataclass(frozen=True)
class Attribute:
    """A compile-time parameter of a node: its name, accepted types and default.

    several: whether it is a sequence of values of these types, stored as a tuple. A default of None means none.
    """

    name: str
    types: tuple[type, ...]
    default: object = None
    required: bool = False
    several: bool = False


@dataclass(frozen=True)
class Op:
    """One kind of node: an entry of the op table."""

    name: str
    doc: str
    inputs: tuple[Port, ...]
    # (shapes by input port, attributes, shapes that the user set by output port) -> shapes by output port. The message
    # of its GraphValidationError gets the node as prefix.
    infer: Callable[[Mapping[str, Shape], Attributes, Mapping[str, Shape]], Mapping[str, Shape]]
    outputs: tuple[Port, ...] = (Port("output", label="OUT_0"),)
    # (t, inputs by port, frozen attributes) -> outputs by port, on float tensors that broadcast as in torch. An op with
    # an expansion gets the expansion computed in torch.
    reference: Callable[..., Mapping[str, object]] | None = None
    # (inputs by port, frozen attributes, rows of each batch by ragged port) -> None. Raises VariantPackError for
    # invalid numbers in memory. Called if they are on the CPU.
    check: Callable[..., None] | None = None
    expansion: Expansion | None = None
    elsewhere: str = ""  # without reference and expansion: why torch cannot compute it from one process's tensors
    attributes: tuple[Attribute, ...] = ()
    cuda: str | None = None  # of a pointwise op: a C++ float expression with slots {port} and {attribute}
    # Data type of all operands and of the rounded result -> cheaper expression with the same bits.
    narrow: Mapping[data_type, str] = field(default_factory=dict)
    packed: str | None = None  # C++ function of the first two inputs, on two packed elements of 16 bits
    cost: Cost | None = None  # of `cuda`
    note: str = ""  # accuracy of `cuda`, for users
    commutative: bool = False  # the operands may be swapped
    # (attributes, input ports given) -> output ports not written.
    absent: Callable[[Attributes, frozenset[str]], frozenset[str]] = lambda attributes, inputs: frozenset()
    # (attributes) -> by output port the only data types that it may be stored in, the default first.
    stored: Callable[[Attributes], Mapping[str, tuple[data_type, ...]]] = lambda attributes: {}
    # (attributes, shapes by input port, (shape, data type) by output port) -> the attributes of the frozen node: those
    # given, and those that users express by properties of tensors.
    frozen: Callable[..., Attributes] = lambda attributes, inputs, outputs: attributes
    order: str = ""  # text for errors about positional arguments, if cuDNN's order differs
    # (shape, attributes, strides by input port) -> the default strides of an output. None: packed, in the axis order of
    # the first input of its shape.
    strides: Callable[[Shape, Attributes, Mapping[str, Stride]], Stride] | None = None
    # Parameter that is a tuple -> its accepted forms: the port or attribute of each element, "" for an unused one.
    tuples: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    # cuDNN's options that are accepted only without effect -> (value other than None that has none, substitute for
    # other values or reason why there is none). Some are attributes, too.
    not_offered: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    # Arguments that are functions of the graph and a tensor, and the function that builds nodes instead if one is
    # given.
    functions: tuple[str, ...] = ()
    by_nodes: Callable[..., list[Any]] | None = None
    # Input port -> the rule that builds its gradient, or the reason why there is none. A single reason holds for all.
    vjp: Mapping[str, Rule | NoRule] | NoRule = UNKNOWN
    # Output port -> rule by which backward recomputes it from inputs and kept outputs, if not by the node itself.
    recompute: Mapping[str, Rule] = field(default_factory=dict)
    # Attributes that replace the user's in a node that is differentiated.
    training: Attributes = field(default_factory=dict)
    integers: bool = False  # whether nodes may compute in INT32, modulo 2^32
    chooses: tuple[str, ...] = ()  # inputs one of whose elements each output element is, perhaps with another sign
    may_recompute: bool = True  # whether backward may compute the node again
    # Equivalent aten operators. Each is written as the operator's name and overload (with the prefix "graphfuse::" one
    # of graphfuse's), a space, then its parameters: "other:b" for one that is the port or attribute b, "alpha=1" for
    # one that must have this value. A parameter that is not listed must have its default.
    aten: tuple[str, ...] = ()

    @cached_property
    def given(self) -> tuple[str, ...]:
        """Names of the outputs whose tensors users give."""
        return tuple(port.name for port in self.outputs if port.given)

    @cached_property
    def inert_options(self) -> Mapping[str, object]:
        """Options that are not attributes, each with the value that has no effect."""
        own = {a.name for a in self.attributes}
        refused = {name: nothing for name, (nothing, _) in self.not_offered.items() if name not in own}
        return {**dict.fromkeys(self.functions), **refused}

    @cached_property
    def by_name(self) -> tuple[str, ...]:
        """Names of the inputs that are keyword-only arguments."""
        return tuple(port.name for port in self.inputs if port.by_name)

    @cached_property
    def returned(self) -> tuple[Port, ...]:
        """The outputs whose tensors the op method returns."""
        return tuple(port for port in self.outputs if not port.given)

    @property
    def pointwise(self) -> bool:
        return self.cuda is not None

    @cached_property
    def moved(self) -> tuple[str, ...]:
        """Names of the inputs whose values are moved to the output."""
        return tuple(port.name for port in self.inputs if port.moved)

    @cached_property
    def ragged(self) -> Mapping[str, str]:
        """Port that may have ragged offsets -> attribute that must be set then."""
        return {port.name: port.ragged for port in (*self.inputs, *self.outputs) if port.ragged}

    @cached_property
    def offsets(self) -> frozenset[str]:
        """Names of the frozen node's input ports of ragged offsets."""
        return frozenset(f"{port}{OFFSETS}" for port in self.ragged)

    @cached_property
    def exact(self) -> tuple[str, ...]:
        """Names of the inputs that are not read in the compute type."""
        return (*(port.name for port in self.inputs if port.moved or port.numbers), *self.offsets)

    def rule(self, port: str) -> Rule | NoRule:
        """Rule that builds the gradient of an input port, or the reason why there is none."""
        return self.vjp if isinstance(self.vjp, NoRule) else self.vjp.get(port, UNKNOWN)

    def keeps(self, output: str) -> bool:
        """True if the node writes only a part of an output port."""
        return any(port.kept for port in self.outputs if port.name == output)


@dataclass(frozen=True)
class Spelling:
    """Another of cuDNN's names for a node of `op`. parameters: (cuDNN's name, the op's name) of each port and
    attribute, all of them required; None if they are those of the op's own method."""

    name: str
    doc: str
    op: str
    parameters: tuple[tuple[str, str], ...] | None = None
