"""Views: tensors read or written as rows x columns, and the places where their rows lie.

A place serves reads and stores alike. Its kinds are `Place` itself, `Within`, `Joined`, `Rest` and `Indexed`. Code
generation, legality and launch arguments ask its methods and nothing else, so a new kind is one class. The defaults are
those of a tensor that has all rows. A pattern makes a place with axes of its match and tensors of numbers; `seen` makes
that a place of the program.

Texts are C++. `name` is that of the kernel's parameter for the tensor's address; parameters of the place begin with it.
`a` has the parameters, `row` the addresses of a row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from graphfuse.dtypes import data_type
from graphfuse.ir import TensorId
from graphfuse.rows.pairs import COLUMNS, EachColumn

Parameter = tuple[str, str, int]
"""Type, name and value of a number that a kernel is given."""


@dataclass(frozen=True)
class Place:
    """All rows of the program, at the view's strides."""

    @property
    def kind(self) -> str:
        """Words for errors about the rows; empty for all rows."""
        return ""

    @property
    def partial(self) -> bool:
        """Whether a row may have no place."""
        return False

    @property
    def late(self) -> bool:
        """Whether addresses of an output are worked out after the row's reads are issued, however early its parameters
        are there."""
        return False

    @property
    def span(self) -> tuple[int, int, int] | None:
        """Axis, first and end of the rows that the tensor has; None for all."""
        return None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The indices of the program that choose rows."""
        return ()

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between rows beside the view's strides."""
        return ()

    @property
    def following(self) -> tuple["View", ...]:
        """Views of the tensors with the rows that follow."""
        return ()

    def only(self, within: "Within") -> "Place":
        """The place of some of the rows."""
        return within

    def seen(self, axes: Mapping[int, int], numbers: Sequence[TensorId]) -> "Place":
        """The place in a program. axes: its row axes by those of the match. numbers: tensors of its indices."""
        return self

    def strided(self, strides: Sequence[int]) -> tuple[int, ...]:
        """The row axes whose stride is a parameter, of the view's strides."""
        return tuple(axis for axis, stride in enumerate(strides) if stride or not self.kind)

    def reach(self, extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
        """Extent and stride of each axis along which the tensor's own rows lie. extents: of all rows."""
        found = list(extents)
        if self.span is not None:
            axis, first, end = self.span
            found[axis] = end - first
        return list(zip(found, strides, strict=True))

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        """Numbers that it takes to find rows. nbytes: of so many elements."""
        yield from ()

    def counted(self, name: str, numbers: Sequence[str]) -> Sequence[str]:
        """The number of a row along each axis as the tensor counts, from that as the program counts."""
        return numbers

    def has(self, name: str, numbers: Sequence[str]) -> str:
        """Condition under which the tensor has the row; empty if it has all, or all that are left."""
        return ""

    def read_type(self, ctype: str) -> str:
        """Type of what `row` has of an input. ctype: of an address."""
        return ctype

    def read_from(self, name: str, address: str) -> str:
        """What `row` has of an input."""
        return address

    def address(self, name: str) -> str:
        """Address of the row of an input, by what `row` has."""
        return f"row.{name}"

    def exists(self, name: str) -> str:
        """Condition under which an input has the row, by what `row` has; empty if it has all."""
        return ""

    def settled(self, name: str) -> str:
        """Statement that completes the address of an output's row; empty if it is complete."""
        return ""


@dataclass(frozen=True)
class Within(Place):
    """Rows whose number along row axis `axis` is from first to end - 1. The tensor's own rows begin with the first."""

    axis: int
    first: int
    end: int

    @property
    def kind(self) -> str:
        return "are some of all"

    @property
    def partial(self) -> bool:
        return True

    @property
    def span(self) -> tuple[int, int, int]:
        return self.axis, self.first, self.end

    def seen(self, axes: Mapping[int, int], numbers: Sequence[TensorId]) -> Place:
        return replace(self, axis=axes.get(self.axis, 0))  # 0: rows without columns have one axis

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        if self.first:
            yield "gf::u32", f"{name}_first", self.first
        yield "gf::u32", f"{name}_end", self.end

    def counted(self, name: str, numbers: Sequence[str]) -> Sequence[str]:
        if not self.first:
            return numbers
        own = f"(gf::u32({numbers[self.axis]}) - a.{name}_first)"
        return [own if axis == self.axis else number for axis, number in enumerate(numbers)]

    def has(self, name: str, numbers: Sequence[str]) -> str:
        number = f"gf::u32({numbers[self.axis]})"
        return f"{number} < a.{name}_end" + f" && {number} >= a.{name}_first" * bool(self.first)


@dataclass(frozen=True)
class Joined(Within):
    """Rows of the first of several tensors that have all that are left between them. rest: the view of the next."""

    rest: "View"

    @property
    def partial(self) -> bool:
        return False

    @property
    def late(self) -> bool:
        return True

    @property
    def following(self) -> tuple["View", ...]:
        return self.rest.parts

    def has(self, name: str, numbers: Sequence[str]) -> str:
        return f"gf::u32({numbers[self.axis]}) < a.{name}_end"  # the tensors before have not got it


@dataclass(frozen=True)
class Rest(Within):
    """Rows of the last of several tensors: all that are left."""

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        if self.first:
            yield "gf::u32", f"{name}_first", self.first

    def has(self, name: str, numbers: Sequence[str]) -> str:
        return ""


@dataclass(frozen=True)
class Indexed(Place):
    """Rows chosen by number. A row whose number the tensor has not is read as NaN, and is not written."""

    index: int  # which of the program's indices has the row's number
    stride: int  # elements between rows of neighbouring numbers
    count: int  # rows of the tensor
    of: Place = Place()  # which rows of the program have a number

    @property
    def kind(self) -> str:
        return "are chosen by number"

    @property
    def partial(self) -> bool:
        return True

    @property
    def late(self) -> bool:
        return True

    @property
    def span(self) -> tuple[int, int, int] | None:
        return self.of.span

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.index, *self.of.numbers)

    @property
    def strides(self) -> tuple[int, ...]:
        return (self.stride, *self.of.strides)

    def only(self, within: Within) -> Place:
        return replace(self, of=self.of.only(within))

    def seen(self, axes: Mapping[int, int], numbers: Sequence[TensorId]) -> Place:
        return replace(self, index=numbers.index(self.index), of=self.of.seen(axes, numbers))

    def reach(self, extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
        # Two rows of one number are the caller's matter.
        return [(e, s) for e, s in self.of.reach(extents, strides) if s] + [(self.count, self.stride)]

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        yield "gf::i64", f"{name}_row", nbytes(self.stride)
        yield "gf::i64", f"{name}_count", self.count
        yield from self.of.parameters(name, nbytes)

    def counted(self, name: str, numbers: Sequence[str]) -> Sequence[str]:
        return self.of.counted(name, numbers)

    def has(self, name: str, numbers: Sequence[str]) -> str:
        return self.of.has(name, numbers)

    def read_type(self, ctype: str) -> str:
        return f"gf::Chosen<{ctype}>"

    def read_from(self, name: str, address: str) -> str:
        return f"{{{address}, a.{name}_row, a.{name}_count}}"

    def address(self, name: str) -> str:
        return f"row.{name}.of(row.n{self.index})"

    def exists(self, name: str) -> str:
        return f"row.{name}.exists(row.n{self.index})"

    def settled(self, name: str) -> str:
        number = f"row.n{self.index}"
        there = f"gf::u64({number}) < gf::u64(a.{name}_count)" + f" && row.{name} != nullptr" * self.of.partial
        return f"row.{name} = {there} ? gf::offset(row.{name}, {number} * a.{name}_row) : nullptr;"


ROWS = Place()


@dataclass(frozen=True)
class View:
    """A tensor read or written as rows x columns, strides in elements."""

    tensor: TensorId
    name: str
    dtype: data_type
    row_strides: tuple[int, ...]  # one for each row axis of the program, 0 where the tensor does not vary
    column_stride: int  # 1 for packed columns, also of tensors without columns
    alignment: int  # bytes that the address is a multiple of
    rows: bool = True  # whether it varies along rows
    columns: bool = True  # whether it varies along columns
    swizzled: bool = False  # in tiles of 128 x 4 (F8_128x4), where strides say nothing
    offset: int = 0  # elements from the tensor's first to that of the view
    place: Place = ROWS  # where its rows lie
    unit: EachColumn = COLUMNS  # what of a row it has an element for

    @property
    def parts(self) -> tuple["View", ...]:
        """Views of all its tensors, this one first."""
        return (self, *self.place.following)


def joined(views: Sequence[View]) -> View:
    """One view of tensors of which each has the rows that follow those of the one before."""
    *before, found = views
    if before:
        found = replace(found, place=Rest(*found.place.span))
    for view in reversed(before):
        found = replace(view, place=Joined(*view.place.span, found))
    return found
