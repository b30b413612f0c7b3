"""Pairs of a row's columns, and units: whether a tensor has an element per column, pair or part (`View.unit`)."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Pairs:
    """Pairs of a row's columns: i and count + i, or, if interleaved, 2 i and 2 i + 1. Later columns are in no pair.

    part: columns of a part, if each part of a row has such pairs; 0 if the row has them.
    """

    count: int
    interleaved: bool
    part: int = 0

    @property
    def columns(self) -> int:
        """Number of columns that are in a pair."""
        return 2 * self.count

    def whole(self, columns: int) -> bool:
        """True if all columns of a row, or of its part, are in a pair. columns: of a row."""
        return self.columns == (self.part or columns)

    def piece(self, piece: int) -> str:
        """Number of the piece `at` within the row or part that has the pairs, in C++. piece: columns of a piece."""
        number = "gf::u32(row.thread + at)"
        return f"{number} % {self.part // piece}u" if self.part else number


@dataclass(frozen=True)
class EachColumn:
    """Unit of a tensor that has an element for each column of a row. Subclasses are the other units."""

    pairs: ClassVar[Pairs | None] = None  # the pairs that have one element each
    part: ClassVar[int] = 0  # neighbouring columns that share an element; 0 for none
    period: ClassVar[int] = 0  # columns after which the elements repeat; 0 if they do not
    halves: ClassVar[bool] = False  # whether columns that are not adjacent share an element
    unpack: ClassVar[str] = "unpack"  # C++ function that converts a piece to values

    def elements_of(self, piece: int) -> int:
        """Number of elements for a piece of `piece` columns."""
        return piece

    def offset(self, piece: int, nbytes: int) -> str:
        """Bytes from a row's first element to the thread's first piece, in C++. nbytes: bytes of a piece."""
        return f"thread * {nbytes}"

    def place(self, piece: int) -> str:
        """Number of pieces from a thread's address in a row to its piece `at`, in C++."""
        return "at"

    def beyond(self, piece: int, columns: int) -> str:
        """Condition, in C++, that a piece of a row of `columns` has no element; empty if every piece has."""
        return ""


@dataclass(frozen=True)
class EachPair(EachColumn):
    """Unit of a tensor that has an element for each pair of columns, of a row or of a part (the same for all parts).

    otherwise: value for columns that are in no pair."""

    of: Pairs
    otherwise: float

    @property
    def pairs(self) -> Pairs:
        return self.of

    @property
    def period(self) -> int:
        return self.pairs.part

    @property
    def halves(self) -> bool:
        return not self.pairs.interleaved

    @property
    def unpack(self) -> str:
        return "unpack" if self.halves else "unpack_pairs"

    def elements_of(self, piece: int) -> int:
        return piece if self.halves else piece // 2

    def offset(self, piece: int, nbytes: int) -> str:
        if self.period:
            return "0"
        first = f"gf::u32(thread) % {self.pairs.count // piece}u" if self.halves else "thread"
        return f"{first} * {nbytes}"

    def place(self, piece: int) -> str:
        if not self.period:
            return "at"
        return self.pairs.piece(piece) + f" % {self.pairs.count // piece}u" * self.halves

    def beyond(self, piece: int, columns: int) -> str:
        if self.pairs.whole(columns):
            return ""
        number = self.pairs.piece(piece) if self.period else "row.thread + at"
        return f"{number} >= {self.pairs.columns // piece}"


@dataclass(frozen=True)
class EachPart(EachColumn):
    """Unit of an output that has an element for each part of a row."""

    part: int


@dataclass(frozen=True)
class EachColumnOfPart(EachColumn):
    """Unit of an input that has an element for each column of a part, the same for all parts."""

    period: int

    def offset(self, piece: int, nbytes: int) -> str:
        return "0"

    def place(self, piece: int) -> str:
        return f"gf::u32(row.thread + at) % {self.period // piece}u"


COLUMNS = EachColumn()
