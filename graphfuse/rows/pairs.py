"""Pairs of a row's columns, and what of a row a tensor has an element for: each column, pair or part (`View.unit`)."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Pairs:
    """Pairs of a row's columns: i and count + i, or, interleaved, 2 i and 2 i + 1. Columns behind them are in none.

    part: columns of each part of a row, if each has such pairs; 0 if the row has them.
    """

    count: int
    interleaved: bool
    part: int = 0

    @property
    def columns(self) -> int:
        """Number of columns that are in a pair."""
        return 2 * self.count

    def whole(self, columns: int) -> bool:
        """True if all columns are in a pair. columns: of a row."""
        return self.columns == (self.part or columns)

    def piece(self, piece: int) -> str:
        """Number of the piece `at` in what has the pairs, in C++. piece: its columns."""
        number = "gf::u32(row.thread + at)"
        return f"{number} % {self.part // piece}u" if self.part else number


@dataclass(frozen=True)
class EachColumn:
    """A tensor has an element for each column of a row."""

    pairs: ClassVar[Pairs | None] = None  # those that have an element each
    part: ClassVar[int] = 0  # neighbouring columns that share an element; 0 for none
    period: ClassVar[int] = 0  # columns after which its elements come again; 0 where they do not
    halves: ClassVar[bool] = False  # whether columns that lie apart share an element
    unpack: ClassVar[str] = "unpack"  # the function that makes values of a piece that is read

    def taken(self, piece: int) -> int:
        """Number of elements that belong to a piece of `piece` columns."""
        return piece

    def offset(self, piece: int, nbytes: int) -> str:
        """Bytes from a row's first element to the thread's first piece, in C++. nbytes: of a piece."""
        return f"thread * {nbytes}"

    def place(self, piece: int) -> str:
        """Number of pieces from the address of a row that a thread has to its piece `at`, in C++."""
        return "at"

    def beyond(self, piece: int, columns: int) -> str:
        """Condition, in C++, under which a piece of a row of `columns` has no element; empty if each has some."""
        return ""


@dataclass(frozen=True)
class EachPair(EachColumn):
    """A tensor has an element for each pair of columns, of a row, or of a part, the same for all parts. otherwise: what
    columns read that are in no pair."""

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

    def taken(self, piece: int) -> int:
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
    """A tensor that is written has an element for each part of a row."""

    part: int


@dataclass(frozen=True)
class EachColumnOfPart(EachColumn):
    """A tensor that is read has an element for each column of a part of a row, the same for all parts."""

    period: int

    def offset(self, piece: int, nbytes: int) -> str:
        return "0"

    def place(self, piece: int) -> str:
        return f"gf::u32(row.thread + at) % {self.period // piece}u"


COLUMNS = EachColumn()
