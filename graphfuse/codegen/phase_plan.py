"""`PhasePlan`: what each phase of a kernel reads, keeps in registers and computes again."""

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
"""Largest number of operations that are repeated in order not to keep a value. LIGHT: arithmetic on prefetched rows.
_FEW: any operations that save registers in other kernels."""


def access(view: View, elements: int, across: bool = False) -> int:
    """Bytes of the widest access for which all pieces of `elements` elements are aligned. across: as in PhasePlan."""
    apart = (*view.row_strides[:-1], view.column_stride) if across else view.row_strides
    strides = (view.dtype.nbytes(abs(stride)) for stride in (*apart, *view.place.strides, view.offset))
    return math.gcd(ACCESS, view.dtype.nbytes(elements), view.alignment, *strides)


@dataclass(frozen=True)
class PhasePlan:
    """A row program, and how a kernel processes rows."""

    program: RowProgram
    extents: tuple[int, ...]  # of the row axes
    columns: int
    piece: int  # elements that a thread accesses together
    resident: bool  # values for later phases stay in registers, instead of being read again (`read_again`)
    unpack_again: bool = False  # kept packed values are unpacked again in each phase
    # Rows that fit shared memory, for prefetching: 1 for no prefetch; 0 if a thread processes one row, not row after
    # row.
    stages: int = 0
    light: int = LIGHT  # most operations that are repeated with prefetched rows
    # A piece has elements of adjacent rows, along the last row axis, in one column, instead of adjacent columns in one
    # row. Values of one per row are then arrays.
    across: bool = False
    scratch: bool = False  # the kernel has scratch memory even without sums over rows
    own_pairs: bool = False  # a thread has two pieces of a row, with both columns of all pairs that are not adjacent

    @property
    def in_32_bits(self) -> bool:
        """True if row numbers and strides are 32-bit where possible. With one row per thread along one axis, or pieces
        across rows, that saves nothing and takes registers."""
        return not self.across and (len(self.extents) > 1 or self.stages > 0)

    def elements_of(self, view: View) -> int:
        """Number of elements of a tensor for a piece; 1 if the tensor does not vary within a piece."""
        varies = view.row_strides[-1] != 0 if self.across else view.columns
        return view.unit.elements_of(self.piece) if varies else 1

    def unpack(self, view: View) -> str:
        """C++ function that converts the elements that are read for a piece to values."""
        return "spread" if self.elements_of(view) < view.unit.elements_of(self.piece) else view.unit.unpack

    def nbytes_of(self, view: View) -> int:
        """Bytes of the elements of a tensor for a piece."""
        return view.dtype.nbytes(self.elements_of(view))

    def width(self, view: View) -> int:
        """Bytes of the accesses that read or write a piece."""
        return min(access(part, self.elements_of(view), self.across) for part in view.parts)

    def has_both(self, index: int) -> bool:
        """True if an input has an element per pair, and a thread has both columns of it."""
        return self.own_pairs and self.program.inputs[index].unit.halves

    def exchanged(self, phase: int) -> tuple[Chain, ...]:
        """Swaps of a phase that get their result from the thread's other piece."""
        made = (o for o in self.elements(phase) if isinstance(o, Chain) and o not in self.kept[phase])
        return tuple(o for o in made if self.own_pairs and self.program.steps[o.index].op_name == SWAP)

    @property
    def phases(self) -> range:
        return range(self.program.last + 1)

    @cached_property
    def kept(self) -> tuple[tuple[Chain | Load, ...], ...]:
        """Elementwise values that each phase has from earlier phases."""
        if not self.resident:
            return ((),) * (self.program.last + 1)
        return ((), *self.program.held(self._again))

    @property
    def _again(self) -> frozenset[Chain | Load]:
        """Values that are read or computed again in a later phase instead of being kept.

        With prefetched rows these are inputs, which are in shared memory or L1, and values at most `light` operations
        from inputs. In other kernels they are values computed from smaller ones."""
        program = self.program
        if not self.stages and program.last < 2:
            return frozenset()
        if not self.stages:
            return frozenset(Chain(k) for k in range(len(program.steps)) if self._is_narrower_again(k))

        operations_to: list[int] = []  # operations from inputs to each step; 0 if others than arithmetic are among them
        for step in program.steps:
            before = [operations_to[o.index] for _, o in step.operands if isinstance(o, Chain) and _varies(program, o)]
            light = cost_of(step) is Cost.ARITHMETIC and step.rounded is None and isinstance(step, Step)
            operations_to.append(1 + sum(before) if light and all(before) else 0)
        light = (Chain(k) for k, operations in enumerate(operations_to) if 0 < operations <= self.light)
        return frozenset([*light, *map(Load, range(len(program.inputs)))])

    def _is_narrower_again(self, k: int) -> bool:
        """True if the values from which a value of a later phase is computed, by a few operations, take fewer bytes."""
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
        """Bytes of an element of a value, in the narrowest type that represents it."""
        rounded = self.program.steps[o.index].rounded if isinstance(o, Chain) else self.program.inputs[o.index].dtype
        return (rounded or data_type.FLOAT).bits // 8

    def elements(self, phase: int) -> tuple[Chain | Load, ...]:
        """Elementwise values that a phase needs, each after its operands."""
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
        """Bytes that a phase reads for each element."""
        return sum(self.nbytes(Load(i)) for i in self.reads(phase, rows))

    def read_in(self, index: int) -> tuple[int, ...]:
        """The phases that read an input from memory."""
        return tuple(p for p in self.phases if index in self.reads(p, True))

    def overwritable(self) -> Iterator[tuple[int, int]]:
        """Numbers of an input and a store that may have the same memory, because each thread writes an element after it
        last read it. A picked element is read by all threads of its row, which synchronize before the next phase."""
        for i, x in enumerate(self.program.inputs):
            for number, store in enumerate(self.program.stores):
                whole = x.rows and x.columns and self.program.extents[store.value.index].columns
                if alike(x, store.view) and whole and not store.block_size and not store.amax:
                    read = max(self.read_in(i), default=0)
                    read = max((read, *(p + 1 for p in self.program.picked_in(i))))
                    if read <= self.program.store_phase(number):
                        yield i, number

    def read_again(self) -> "PhasePlan":
        """The plan for rows that are not resident. An output that may overwrite an input is written in the last phase,
        because the input is read until then. So residency does not decide what may be updated in place."""
        late = frozenset(number for _, number in self.overwritable())
        return replace(self, program=replace(self.program, late=late), resident=False)

    @cached_property
    def held_bytes(self) -> int:
        """Most bytes per element that are kept between phases."""
        return max(sum(map(self.nbytes, kept)) for kept in self.kept)

    def nbytes(self, o: Chain | Load) -> int:
        """Bytes of one element of a value, as it is kept."""
        dtype = self.dtype(o)
        return 4 if dtype is None else dtype.bits // 8

    def dtype(self, o: Chain | Load) -> data_type | None:
        """The type in which a value is packed: that of an input, or that of a rounded value in `packed`. None for a
        float32 array."""
        if isinstance(o, Load):
            return self.program.inputs[o.index].dtype
        return self.program.steps[o.index].rounded if o in self.packed else None

    @cached_property
    def packed(self) -> frozenset[Chain]:
        """Rounded values that are kept, stored or computed with in the type that they are rounded to."""
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
        """Steps that compute two packed elements at a time, each rounded once.

        The result equals rounding to float32 first, which has more than twice the bits (Figueroa 1995), except for
        products that are subnormal in float32."""
        return frozenset(Chain(k) for k, step in enumerate(self.program.steps) if self._is_paired(step))

    def _is_paired(self, step: AnyStep) -> bool:
        return is_narrow(step) and all(self._is_packable(o, step.rounded) for _, o in step.operands)

    def _is_packable(self, o: Operand, dtype: data_type) -> bool:
        """True if a value is, or can be, packed in a type."""
        if not self.program.extent(o).columns:
            return False
        if isinstance(o, Load):
            view = self.program.inputs[o.index]
            return view.dtype is dtype and self.unpack(view) == "unpack"
        return (
            isinstance(o, Chain) and o not in self.program.one_a_part and self.program.steps[o.index].rounded is dtype
        )


def is_narrow(step: AnyStep) -> bool:
    """True if a step has operands of 16 bits and an op with arithmetic on two packed elements."""
    return isinstance(step, Step) and step.narrow and step.op_name in OPS and OPS[step.op_name].packed is not None


def alike(x: View, y: View) -> tuple[tuple[View, View], ...]:
    """Pairs of views of an input and an output with the same rows and layout."""

    def layout(view: View) -> tuple[object, ...]:
        return view.unit, view.dtype, view.row_strides, view.column_stride

    return tuple((a, b) for a in x.parts for b in y.parts if a.place.like(b.place) and layout(a) == layout(b))


def _varies(program: RowProgram, o: Chain) -> bool:
    return program.extents[o.index].rows and program.extents[o.index].columns


def _plain(store: Store) -> bool:
    return not store.amax and not store.block_size and not store.view.unit.part
