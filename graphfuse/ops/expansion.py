"""Expansions of ops into pointwise ops and reductions of rows, and the interface that they are written with.

Kernels and references use the same expansion: `rows.emitter` converts it to steps of a row program, `torch_expansion`
computes it on tensors.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Values = Mapping[str, object]
"""Values by port."""

Columns = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, object]], tuple[int, ...]]
"""(shapes by input port, attributes) -> the axes of a row. "input", or else the first port, has all rows."""


class Join(enum.Enum):
    """Operation that reduces the elements of a row to one value."""

    SUM = "row_sum"
    MAX = "row_max"


class RowArithmetic(ABC):
    """Arithmetic on values of rows, which it computes or records. Its values are opaque; numbers are values, too."""

    columns: int  # elements of a row
    most: float  # the largest finite number of the type that it computes in

    @abstractmethod
    def op(self, name: str, attributes: Mapping[str, object] = MappingProxyType({}), /, **operands: object) -> object:
        """The result of a pointwise op of the table, with operands by port; or of fma, a * b + c, or fnma, c - a * b,
        which kernels round once."""

    @abstractmethod
    def reduce(self, join: Join, value: object) -> object:
        """One value of each row: all its elements reduced by `join`."""

    @abstractmethod
    def mean(self, value: object) -> object:
        """The mean of each row."""

    @abstractmethod
    def power(self, value: object) -> object:
        """e^value, for values not above zero."""

    @abstractmethod
    def numbers(self) -> object:
        """The number of each element in its row, from 0."""

    @abstractmethod
    def random_at_least(self, seed: object, offset: object, least: int) -> object:
        """1 for each element whose random number, of 16 bits as in ``dropout``, is at least `least`, else 0."""


@dataclass(frozen=True)
class Expansion:
    """Definition of an op with several steps per row, as pointwise ops and reductions.

    A kernel and the op's reference need nothing else. The same steps written as nodes of a graph make the same program,
    and so the same kernel.
    """

    # (arithmetic, values by input port, attributes) -> by output port the value of each row, or a tuple: the factors of
    # a product that is summed over all rows. A port that is not connected has no value.
    of: Callable[[RowArithmetic, Values, Mapping[str, object]], Values]
    columns: Columns
    scalars: frozenset[str] = frozenset()  # input ports of one element
    of_columns: frozenset[str] = frozenset()  # input ports that are the same for all rows, even if there is one row
    of_rows: frozenset[str] = frozenset()  # input ports of one element per row, even if there is one row or column
    is_random: bool = False  # whether it has random numbers; it then computes each element separately
    in_rows: bool = True  # whether kernels of rows support it
