"""What expansions of ops are written in, and with: pointwise ops and reductions, on rows.

Kernels and references read the same expansion: `rows.emitter` makes steps of a row program of it, `by_torch` computes
it on tensors.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Values = Mapping[str, object]
"""By port."""

Columns = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, object]], tuple[int, ...]]
"""(shapes by input port, of which "input" or else the first has all rows, attributes) -> the axes of a row."""


class Join(enum.Enum):
    """Operation that makes one value of the elements of a row."""

    SUM = "row_sum"
    MAX = "row_max"


class RowArithmetic(ABC):
    """Computes with values of a row, or writes down how. Its own values are opaque; plain numbers are values, too."""

    columns: int  # elements of a row
    most: float  # the largest finite number of the type that it computes in

    @abstractmethod
    def op(self, name: str, attributes: Mapping[str, object] = MappingProxyType({}), /, **operands: object) -> object:
        """A pointwise op of the table, its operands by port; or fma, a * b + c, or fnma, c - a * b, rounded once in
        kernels."""

    @abstractmethod
    def reduce(self, join: Join, value: object) -> object:
        """One value of each row: all its elements joined."""

    @abstractmethod
    def mean(self, value: object) -> object:
        """The mean of each row."""

    @abstractmethod
    def power(self, value: object) -> object:
        """e^value, of what is not above zero."""

    @abstractmethod
    def numbers(self) -> object:
        """The number of each element in its row, from 0."""

    @abstractmethod
    def random_at_least(self, seed: object, offset: object, least: int) -> object:
        """1 for each element whose random number, of 16 bits as ``dropout`` says, is `least` or more, else 0."""


@dataclass(frozen=True)
class Expansion:
    """An op that takes several steps a row, spelled as pointwise ops and reductions.

    It is all that a kernel and the op's reference need to know. The same steps written as nodes of a graph make the
    same program, and so the same kernel.
    """

    # (arithmetic, values by input port, attributes) -> by output port what is computed of each row, or the factors of a
    # product whose sum over all rows it is. A port that is not connected has no value.
    of: Callable[[RowArithmetic, Values, Mapping[str, object]], Values]
    columns: Columns
    scalars: frozenset[str] = frozenset()  # input ports of one element in all
    of_columns: frozenset[str] = frozenset()  # those that are the same for all rows, however few there are
    of_rows: frozenset[str] = frozenset()  # those of one element a row, however few rows or columns there are
    is_random: bool = False  # whether it draws random numbers, which makes it one of an element by itself
    in_rows: bool = True  # whether kernels of rows take it
