"""Pairs of a row's columns, and what of a row a tensor has an element for: each column, or each pair.

`View.unit` is one of the two kinds. Texts are C++.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pairs:
    """Pairs of a row's columns: i and count + i, or, interleaved, 2 i and 2 i + 1. Columns behind them are in none."""

    count: int
    interleaved: bool

    @property
    def columns(self) -> int:
        """Number of columns that are in a pair."""
        return 2 * self.count


@dataclass(frozen=True)
class EachColumn:
    """A tensor has an element for each column of a row."""

    @property
    def pairs(self) -> Pairs | None:
        """The pairs that have an element each; None where columns have."""
        return None

    @property
    def halves(self) -> bool:
        """Whether columns that lie apart share an element."""
        return False

    @property
    def unpack(self) -> str:
        """Function that makes a piece of values of what is read."""
        return "unpack"

    def taken(self, piece: int) -> int:
        """Number of elements that belong to a piece of `piece` columns."""
        return piece

    def offset(self, piece: int, nbytes: int) -> str:
        """Bytes from a row's first element to those of the thread's first piece. nbytes: of a piece."""
        return f"thread * {nbytes}"

    def beyond(self, piece: int, columns: int) -> str:
        """Condition under which a piece has no element; empty where each has some."""
        return ""


@dataclass(frozen=True)
class EachPair(EachColumn):
    """A tensor has an element for each pair of columns. otherwise: what columns read that are in no pair."""

    of: Pairs
    otherwise: float

    @property
    def pairs(self) -> Pairs:
        return self.of

    @property
    def halves(self) -> bool:
        return not self.of.interleaved

    @property
    def unpack(self) -> str:
        return "unpack_pairs" if self.of.interleaved else "unpack"

    def taken(self, piece: int) -> int:
        return piece // 2 if self.of.interleaved else piece

    def offset(self, piece: int, nbytes: int) -> str:
        return f"gf::u32(thread) % {self.of.count // piece}u * {nbytes}" if self.halves else f"thread * {nbytes}"

    def beyond(self, piece: int, columns: int) -> str:
        return f"row.thread + at >= {self.of.columns // piece}" if self.of.columns < columns else ""


COLUMNS = EachColumn()
