"""Views: tensors read or written as rows x columns, and the places where their rows lie.

A place serves reads and stores alike. Its kinds are `Place` itself, `Within`, `Indexed` and `OfRank`. Code generation,
legality and launch arguments use only the methods of `Place`, whose defaults are for a tensor that has all rows. So a
new kind is one class. A pattern makes a place with axes of its match and tensors of numbers; `in_program` converts it
to axes and indices of the program.

Methods return C++. `name` is the kernel's parameter for the tensor's address; the place's parameters begin with it.
In C++, `a` has the parameters, and `row` has the addresses of a row; `address` is one of these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.ir import TensorId
from graphfuse.rows.pairs import COLUMNS, EachColumn

Parameter = tuple[str, str, int]
"""Type, name and value of a number that is passed to a kernel."""


@dataclass(frozen=True)
class Place:
    """All rows of the program, at the view's strides."""

    kind: ClassVar[str] = ""  # text for errors about the rows; empty for all rows
    partial: ClassVar[bool] = False  # whether the tensor may lack some rows
    late: ClassVar[bool] = False  # whether addresses of an output wait until the row's reads are issued
    axes: ClassVar[tuple[int, ...]] = ()  # row axes that it needs separate from all others
    span: ClassVar[tuple[int, int, int] | None] = None  # axis, first and end of the rows that the tensor has
    numbers: ClassVar[tuple[int, ...]] = ()  # the indices of the program that choose rows
    strides: ClassVar[tuple[int, ...]] = ()  # elements between rows in addition to the view's strides
    following: ClassVar[tuple["View", ...]] = ()  # views of the tensors that have the following rows

    def only(self, within: "Within") -> "Place":
        """The place limited to some of the rows."""
        return within

    def in_program(self, axes: Mapping[int, int], numbers: Sequence[TensorId]) -> "Place":
        """The place in terms of a program. axes: match axis -> row axis. numbers: tensors of the program's indices."""
        return self

    def like(self, other: "Place") -> bool:
        """True if both places have the same rows, at the same addresses if both tensors begin at the same one."""
        return self == other

    def reach(self, extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
        """Extent and stride of each axis along which the tensor's own rows lie. extents: of all rows."""
        return list(zip(extents, strides, strict=True))

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        """Kernel parameters for finding rows. nbytes: converts elements to bytes."""
        yield from ()

    def counted(self, name: str, numbers: Sequence[str]) -> Sequence[str]:
        """Number of a row in the tensor along each axis. numbers: those in the program."""
        return numbers

    def has(self, name: str, numbers: Sequence[str]) -> str:
        """Condition that the tensor has the row; empty if it has all, or all that the tensors before it lack."""
        return ""

    def located(self, name: str) -> Iterator[tuple[str, str, str]]:
        """Type, name and value of members of `row` besides addresses, set after the row numbers have been read."""
        yield from ()

    def address(self, name: str, address: str) -> str:
        """Address of an input's row, from the members of `row`."""
        return address

    def exists(self, name: str) -> str:
        """Condition that an input has the row, from the members of `row`; empty if it has all."""
        return ""

    def settled(self, name: str, address: str) -> str:
        """Final address of an output's row; empty if that is `address`."""
        return ""


@dataclass(frozen=True)
class Within(Place):
    """Rows whose number along row axis `axis` is from first to end - 1. The tensor's own rows begin with the first."""

    axis: int
    first: int
    end: int
    rest: "View | None" = None  # the next of several tensors that together have all rows
    after: bool = False  # whether other tensors have the rows before first
    kind: ClassVar[str] = "are some of all"

    @property
    def partial(self) -> bool:
        return self.rest is None

    @property
    def late(self) -> bool:
        return self.rest is not None

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.axis,)

    @property
    def span(self) -> tuple[int, int, int]:
        return self.axis, self.first, self.end

    @property
    def following(self) -> tuple["View", ...]:
        return self.rest.parts if self.rest else ()

    def in_program(self, axes: Mapping[int, int], numbers: Sequence[TensorId]) -> Place:
        return replace(self, axis=axes.get(self.axis, 0))  # rows without columns have one axis

    def like(self, other: Place) -> bool:
        return isinstance(other, Within) and self.span == other.span

    def reach(self, extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
        own = self.end - self.first
        return [(own if k == self.axis else e, s) for k, (e, s) in enumerate(zip(extents, strides, strict=True))]

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        if self.first:
            yield "gf::u32", f"{name}_first", self.first
        if self.rest or not self.after:  # the last of several tensors has all remaining rows
            yield "gf::u32", f"{name}_end", self.end

    def counted(self, name: str, numbers: Sequence[str]) -> Sequence[str]:
        own = f"(gf::u32({numbers[self.axis]}) - a.{name}_first)" if self.first else numbers[self.axis]
        return [*numbers[: self.axis], own, *numbers[self.axis + 1 :]]

    def has(self, name: str, numbers: Sequence[str]) -> str:
        number = f"gf::u32({numbers[self.axis]})"
        if self.rest or self.after:  # the tensors before it lack the row
            return f"{number} < a.{name}_end" if self.rest else ""
        return f"{number} < a.{name}_end" + f" && {number} >= a.{name}_first" * bool(self.first)


@dataclass(frozen=True)
class Indexed(Place):
    """Rows chosen by number. A row is read as NaN, and not written, if the tensor has no row of that number."""

    index: int  # number of the program's index that chooses the rows
    stride: int  # elements between rows of adjacent numbers
    count: int  # rows of the tensor
    of: Place = Place()  # the rows of the program that are chosen
    kind: ClassVar[str] = "are chosen by number"
    partial: ClassVar[bool] = True
    late: ClassVar[bool] = True

    @property
    def axes(self) -> tuple[int, ...]:
        return self.of.axes

    @property
    def span(self) -> tuple[int, int, int] | None:
        return self.of.span

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.index,)

    @property
    def strides(self) -> tuple[int, ...]:
        return (self.stride,)

    def only(self, within: Within) -> Place:
        return replace(self, of=within)

    def in_program(self, axes: Mapping[int, int], numbers: Sequence[TensorId]) -> Place:
        return replace(self, index=numbers.index(self.index), of=self.of.in_program(axes, numbers))

    def like(self, other: Place) -> bool:
        return False

    def reach(self, extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
        # The caller is responsible for two rows with one number.
        return [(e, s) for e, s in self.of.reach(extents, strides) if s] + [(self.count, self.stride)]

    def parameters(self, name: str, nbytes: Callable[[int], int]) -> Iterator[Parameter]:
        yield "gf::i64", f"{name}_row", nbytes(self.stride)
        yield "gf::i64", f"{name}_count", self.count
        yield from self.of.parameters(name, nbytes)

    def counted(self, name: str, numbers: Sequence[str]) -> Sequence[str]:
        return self.of.counted(name, numbers)

    def has(self, name: str, numbers: Sequence[str]) -> str:
        return self.of.has(name, numbers)

    def located(self, name: str) -> Iterator[tuple[str, str, str]]:
        number = f"row.n{self.index}"
        yield "bool", f"{name}_there", f"gf::u64({number}) < gf::u64(a.{name}_count)"
        # If the tensor has no such row, the offset is not used.
        yield "gf::i64", f"{name}_far", f"gf::times(decltype(a.{name}_count)({number}), a.{name}_row)"

    def address(self, name: str, address: str) -> str:
        return f"gf::offset({address}, row.{name}_far)"

    def exists(self, name: str) -> str:
        return f"row.{name}_there"

    def settled(self, name: str, address: str) -> str:
        there = self.exists(name) + f" && {address} != nullptr" * self.of.partial
        return f"{there} ? {self.address(name, address)} : nullptr"


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one host. table: tensor of addresses (``all_reduce``). rank: this process's. size: number of ranks."""

    table: TensorId
    rank: int
    size: int


@dataclass(frozen=True)
class OfRank(Place):
    """All rows, in the memory of a rank, at the same offset as in this process's memory."""

    group: RankGroup
    rank: int
    number: int = 0  # number of the program's group
    kind: ClassVar[str] = "are those of several ranks"
    late: ClassVar[bool] = True

    def like(self, other: Place) -> bool:
        return False  # other ranks may still read an element after this one has written it

    def address(self, name: str, address: str) -> str:
        return f"gf::offset({address}, row.{self.distance})"

    def settled(self, name: str, address: str) -> str:
        return self.address(name, address)

    @property
    def distance(self) -> str:
        """Member of `row` with the distance in bytes from this process's memory to the rank's."""
        return f"rank{self.rank}" + f"_{self.number}" * bool(self.number)


ROWS = Place()


@dataclass(frozen=True)
class View:
    """A tensor read or written as rows x columns, strides in elements."""

    tensor: TensorId
    name: str
    dtype: data_type
    row_strides: tuple[int, ...]  # one for each row axis of the program; 0 if the tensor does not vary along it
    column_stride: int  # 1 for packed columns, also of tensors without columns
    alignment: int  # of the address, in bytes
    rows: bool = True  # whether it varies along rows
    columns: bool = True  # whether it varies along columns
    swizzled: bool = False  # in tiles of 128 x 4 (F8_128x4), which strides do not describe
    offset: int = 0  # elements from the tensor's first element to the view's
    place: Place = ROWS  # where its rows lie
    unit: EachColumn = COLUMNS  # what part of a row one element stands for

    @property
    def parts(self) -> tuple["View", ...]:
        """Views of all tensors of a joined view, this one first."""
        return (self, *self.place.following)


def joined(views: Sequence[View]) -> View:
    """One view of several tensors, each with the rows that follow those of the previous one."""
    if len(views) == 1:
        return views[0]
    found = None
    for number, view in reversed([*enumerate(views)]):
        found = replace(view, place=replace(view.place, rest=found, after=number > 0))
    return found
