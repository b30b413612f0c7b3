"""How a kernel goes through the rows of a program: what each phase reads, keeps and recomputes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS, Cost
from graphfuse.rows.program import SWAP, RowProgram, Store, cost_of
from graphfuse.rows.steps import AnyStep, Chain, Load, Number, Operand, Scalar, Step
from graphfuse.rows.views import View

ACCESS = 16
"""Bytes of the widest memory access."""

LIGHT, _FEW = 2, 3
"""Operations, at most, that are rather done again than their result kept: arithmetic, where rows are copied ahead; any
that save registers elsewhere."""


def access(view: View, elements: int, across: bool = False) -> int:
    """Bytes of the widest access that every piece of `elements` elements is aligned for. across: as of PhasePlan."""
    apart = (*view.row_strides[:-1], view.column_stride) if across else view.row_strides
    strides = (view.dtype.nbytes(abs(stride)) for stride in (*apart, *view.place.strides, view.offset))
    return math.gcd(ACCESS, view.dtype.nbytes(elements), view.alignment, *strides)


@dataclass(frozen=True)
class PhasePlan:
    """A row program and how a kernel goes through rows."""

    program: RowProgram
    extents: tuple[int, ...]  # of the row axes
    columns: int
    piece: int  # elements that a thread takes together
    resident: bool  # what later phases need is kept in registers, not read and computed again (`read_again`)
    unpack_again: bool = False  # kept values of few bits are unpacked for each phase
    # Rows that have room in shared memory, into which they are copied before their turn: 1 for none; 0 where a thread
    # takes one row, not row after row.
    stages: int = 0
    light: int = LIGHT  # operations, at most, that are done again where rows are copied
    # A piece has one column's elements of neighbouring rows, along the last row axis, instead of one row's of
    # neighbouring columns; then what is one a row is an array.
    across: bool = False
    scratch: bool = False  # the kernel has memory of its own, also without sums over rows
    own_pairs: bool = False  # a thread has two pieces of a row, each other's columns of all pairs that lie apart

    @property
    def in_32_bits(self) -> bool:
        """True if rows are counted, and their distances are, in 32 bits where these suffice. Of one row of a thread,
        along one axis, that saves nothing, and takes registers; across rows, too."""
        return not self.across and (len(self.extents) > 1 or self.stages > 0)

    def taken(self, view: View) -> int:
        """Elements of a tensor that belong to a piece: one of what is the same for all of it."""
        varies = view.row_strides[-1] != 0 if self.across else view.columns
        return view.unit.taken(self.piece) if varies else 1

    def unpack(self, view: View) -> str:
        """The function that makes values of what a piece reads of an input."""
        return "spread" if self.taken(view) < view.unit.taken(self.piece) else view.unit.unpack

    def nbytes_of(self, view: View) -> int:
        """Bytes of the elements of a piece."""
        return view.dtype.nbytes(self.taken(view))

    def width(self, view: View) -> int:
        """Bytes of the accesses that read or write a piece."""
        return min(access(part, self.taken(view), self.across) for part in view.parts)

    def has_both(self, index: int) -> bool:
        """True if an input has columns for pairs, of which a thread has both columns."""
        return self.own_pairs and self.program.inputs[index].unit.halves

    def exchanged(self, phase: int) -> tuple[Chain, ...]:
        """Steps of a phase that have what a thread works out of its other piece."""
        made = (o for o in self.elements(phase) if isinstance(o, Chain) and o not in self.kept[phase])
        return tuple(o for o in made if self.own_pairs and self.program.steps[o.index].op_name == SWAP)

    @property
    def phases(self) -> range:
        return range(self.program.last + 1)

    @cached_property
    def kept(self) -> tuple[tuple[Chain | Load, ...], ...]:
        """Values that each phase has of an element from the phases before."""
        if not self.resident:
            return ((),) * (self.program.last + 1)
        return ((), *self.program.held(self._again))

    @property
    def _again(self) -> frozenset[Chain | Load]:
        """Values that are not kept though a later phase needs them. Where rows are copied: what is read, for it lies in
        shared memory or the L1, and what takes `light` operations to work out from that. Elsewhere what is made of
        values that take less room."""
        program = self.program
        if not self.stages and program.last < 2:
            return frozenset()
        if not self.stages:
            return frozenset(Chain(k) for k in range(len(program.steps)) if self._is_narrower_again(k))

        taken: list[int] = []  # operations from what is read to each step, none where it is no light work
        for step in program.steps:
            before = [taken[o.index] for _, o in step.operands if isinstance(o, Chain) and _varies(program, o)]
            light = cost_of(step) is Cost.ARITHMETIC and step.rounded is None and isinstance(step, Step)
            taken.append(1 + sum(before) if light and all(before) else 0)
        light = (Chain(k) for k, operations in enumerate(taken) if 0 < operations <= self.light)
        return frozenset([*light, *map(Load, range(len(program.inputs)))])

    def _is_narrower_again(self, k: int) -> bool:
        """True if a value of a later phase than the first takes fewer bytes as what it is made from, a few operations
        before."""
        program, operations, made_from = self.program, 0, set[Chain | Load]()

        def visit(o: Operand) -> None:
            nonlocal operations
            if isinstance(o, Scalar | Number) or not (program.extent(o).rows and program.extent(o).columns):
                return
            if isinstance(o, Load) or not program.earliest[o.index]:
                made_from.add(o)
                return
            operations += 1
            for _, operand in program.steps[o.index].operands:
                visit(operand)

        visit(Chain(k))
        found = program.earliest[k] > 0 and program.steps[k].rounded is None and 0 < operations <= _FEW
        return found and sum(self._least_bytes(o) for o in made_from) < data_type.FLOAT.nbytes(1)

    def _least_bytes(self, o: Chain | Load) -> int:
        """Bytes of an element, in the narrowest type that keeps it."""
        rounded = self.program.steps[o.index].rounded if isinstance(o, Chain) else self.program.inputs[o.index].dtype
        return (rounded or data_type.FLOAT).bits // 8

    def elements(self, phase: int) -> tuple[Chain | Load, ...]:
        """Values that a phase needs of an element, each after its operands."""
        return self._elements[phase]

    @cached_property
    def _elements(self) -> tuple[tuple[Chain | Load, ...], ...]:
        return tuple(self.program.elements(phase, self.kept[phase]) for phase in self.phases)

    def reads(self, phase: int, rows: bool) -> tuple[int, ...]:
        """Inputs that a phase reads: those that vary over rows, or those that do not."""
        return tuple(i for i in self._reads[phase] if self.program.inputs[i].rows == rows)

    @cached_property
    def _reads(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the inputs that each phase reads, in order."""
        needed = (set(self.elements(phase)).difference(self.kept[phase]) for phase in self.phases)
        return tuple(tuple(sorted(o.index for o in found if isinstance(o, Load))) for found in needed)

    def read_bytes(self, phase: int, rows: bool) -> int:
        """Bytes that a phase reads of each element."""
        return sum(self.nbytes(Load(i)) for i in self.reads(phase, rows))

    def read_in(self, index: int) -> tuple[int, ...]:
        """The phases that read an input from memory."""
        return tuple(p for p in self.phases if index in self.reads(p, True))

    def overwritable(self) -> Iterator[tuple[int, int]]:
        """Numbers of an input and a store that may be one memory: each thread writes an element after it last
        read it, if both lie at one address. An element that is picked all threads of its row read, which meet before
        the next phase."""
        for i, x in enumerate(self.program.inputs):
            for number, store in enumerate(self.program.stores):
                whole = x.rows and x.columns and self.program.extents[store.value.index].columns
                if alike(x, store.view) and whole and not store.block_size and not store.amax:
                    read = max(self.read_in(i), default=0)
                    read = max((read, *(p + 1 for p in self.program.picked_in(i))))
                    if read <= self.program.store_phase(number):
                        yield i, number

    def read_again(self) -> "PhasePlan":
        """The same rows where they are not resident. What may be written over an input is written in the last phase,
        as the input is read again until then: where rows have room decides nothing about memory."""
        late = frozenset(number for _, number in self.overwritable())
        return replace(self, program=replace(self.program, late=late), resident=False)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of each element that are kept between phases."""
        return max(sum(map(self.nbytes, kept)) for kept in self.kept)

    def nbytes(self, o: Chain | Load) -> int:
        """Bytes of one element of a value, as it is kept."""
        dtype = self.dtype(o)
        return 4 if dtype is None else dtype.bits // 8

    def dtype(self, o: Chain | Load) -> data_type | None:
        """The type as which a value is packed: an input as it is read, one that is rounded if it is kept or stored
        so. None for float32, an array."""
        if isinstance(o, Load):
            return self.program.inputs[o.index].dtype
        return self.program.steps[o.index].rounded if o in self.packed else None

    @cached_property
    def packed(self) -> frozenset[Chain]:
        """Rounded values that are kept, stored or computed with as what they are rounded to."""
        program = self.program
        whole = {o for kept in self.kept for o in kept}
        whole |= {operand for o in self.paired for _, operand in program.steps[o.index].operands} | self.paired
        whole |= {s.value for s in program.stores if _plain(s) and s.view.dtype is program.steps[s.value.index].rounded}
        return frozenset(
            o
            for o in whole
            if isinstance(o, Chain) and program.extents[o.index].columns
            if program.steps[o.index].rounded not in (None, data_type.FLOAT)
        )

    @cached_property
    def paired(self) -> frozenset[Chain]:
        """Steps that compute two packed elements at a time, each rounded once. That is the same as rounding to float32
        first, which has more than twice the bits (Figueroa 1995), but where a product is subnormal in float32."""
        return frozenset(Chain(k) for k, step in enumerate(self.program.steps) if self._is_paired(step))

    def _is_paired(self, step: AnyStep) -> bool:
        return is_narrow(step) and all(self._is_packable(o, step.rounded) for _, o in step.operands)

    def _is_packable(self, o: Operand, dtype: data_type) -> bool:
        """True if a value is, or can be, in pieces of elements of a type."""
        if not self.program.extent(o).columns:
            return False
        if isinstance(o, Load):
            view = self.program.inputs[o.index]
            return view.dtype is dtype and self.unpack(view) == "unpack"
        return (
            isinstance(o, Chain) and o not in self.program.one_a_part and self.program.steps[o.index].rounded is dtype
        )


def is_narrow(step: AnyStep) -> bool:
    """True if a step computes with elements of 16 bits, for which there is arithmetic on two at a time."""
    return isinstance(step, Step) and step.narrow and step.op_name in OPS and OPS[step.op_name].packed is not None


def alike(x: View, y: View) -> tuple[tuple[View, View], ...]:
    """The parts of an input and an output that have the same rows, each element at one address if both begin there."""

    def layout(view: View) -> tuple[object, ...]:
        return view.unit, view.dtype, view.row_strides, view.column_stride

    return tuple((a, b) for a in x.parts for b in y.parts if a.place.like(b.place) and layout(a) == layout(b))


def _varies(program: RowProgram, o: Chain) -> bool:
    return program.extents[o.index].rows and program.extents[o.index].columns


def _plain(store: Store) -> bool:
    return not store.amax and not store.block_size and not store.view.unit.part
