"""Row programs: what a fused kernel computes for each row of tensors seen as rows x columns.

A program is a straight line of steps. Most are pointwise ops, on values of one per element, column, row or tensor.
`Reduce` makes one value of a row. It cuts the program into phases: what must be known before the reduction, and what
can only be computed after it. Values may also be summed over all rows. Nothing here depends on how rows are spread over
threads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS, Cost
from graphfuse.rows.pairs import Pairs
from graphfuse.rows.steps import (
    AnyStep,
    Chain,
    Column,
    Join,
    Load,
    Number,
    Operand,
    Pick,
    Reduce,
    RowNumber,
    Scalar,
    Step,
)
from graphfuse.rows.views import OfRank, RankGroup, View

SWAP, RANDOM = "swap_pairs", "random_at_least"
DIVISOR, QUOTIENT = "divisor", "quotient"
BELOW, REST, NARROW_QUOTIENT = "reciprocal_below", "reciprocal_rest", "narrow_quotient"
OF_PARTS = {Join.SUM: "part_sum", Join.MAX: "part_max"}
"""Steps that join the elements of a part of a row, and have the result for each of them."""


@dataclass(frozen=True)
class StepOp:
    """A pointwise op that only steps of row programs have. cuda, cost: as of ``ops.Op``."""

    cuda: str
    cost: Cost = Cost.ARITHMETIC


FUSED = {
    "fma": StepOp("gf::fma({a}, {b}, {c})"),
    "fnma": StepOp("gf::fma(-{a}, {b}, {c})"),
    "exp2_approx": StepOp("gf::exp2_approx({input})", Cost.FUNCTION),
    SWAP: StepOp(""),
    DIVISOR: StepOp("gf::reciprocal_of_divisor({b})", Cost.FUNCTION),
    QUOTIENT: StepOp("gf::quotient({a}, {b}, {reciprocal}, exact)", Cost.FUNCTION),
    BELOW: StepOp("gf::reciprocal_below({b})", Cost.FUNCTION),
    REST: StepOp("gf::reciprocal_rest({b}, {reciprocal})", Cost.FUNCTION),
    NARROW_QUOTIENT: StepOp("gf::narrow_quotient({a}, {b}, {reciprocal}, {rest}, exact)"),
    RANDOM: StepOp("gf::random_at_least({seed}, {offset}, {row}, {column}, {least}) ? 1.0f : 0.0f", Cost.FUNCTION),
    **dict.fromkeys(OF_PARTS.values(), StepOp("", Cost.FUNCTION)),
}
"""Beside the op table's: a * b + c and c - a * b, rounded once; 2^input; what no element makes by itself, the other
column of its pair (see ``Pairs``), the first column's negated, 0 where there is no pair; the reciprocal of one value,
and a / b by that of b, for a piece of which each element is so, likewise by a reciprocal in two parts (see
``division``); whether the random number of an element's place is no smaller than another; what the elements of its part
of the row have together, `size` neighbouring columns."""
DIVIDES = (QUOTIENT, NARROW_QUOTIENT)


def cost_of(step: AnyStep) -> Cost:
    """Cost of a step for each element."""
    if isinstance(step, Reduce | Pick):
        return Cost.ARITHMETIC
    return (FUSED.get(step.op_name) or OPS[step.op_name]).cost


def of_parts(steps: Sequence[AnyStep], has_columns: Callable[[Operand], bool]) -> frozenset[Operand]:
    """Values that vary along a row, of which the elements of a part have one."""
    found: set[Operand] = set()
    for k, step in enumerate(steps):
        read = [o for _, o in step.operands]
        one = all(o in found or not has_columns(o) for o in read) and not found.isdisjoint(read)
        if part_of(step) or isinstance(step, Step) and one:
            found.add(Chain(k))
    return frozenset(found)


def part_of(step: AnyStep) -> int:
    """Columns of the parts of rows that a step joins; 0 for a step that joins none."""
    return dict(step.attributes)["size"] if isinstance(step, Step) and step.op_name in OF_PARTS.values() else 0


def exchanges(step: AnyStep) -> bool:
    """True for a step whose result no element makes by itself: others' columns are in it."""
    return step.op_name == SWAP or part_of(step) > 0


@dataclass(frozen=True)
class Store:
    """A value that is written."""

    view: View
    value: Chain
    block_size: int = 0  # elements that share a scale; 0 where the output is not quantized in blocks
    block_scale: View | None = None  # where the scales go, columns / block_size a row
    amax: bool = False  # the view is one element, the largest magnitude of all
    scales_of: data_type | None = None  # the view is of the scales alone, for elements of this type, not written


@dataclass(frozen=True)
class ColumnSum:
    """The sum over all rows of a value, or of the product of two, that is written: one element a column."""

    view: View
    factors: tuple[Operand, ...]


@dataclass(frozen=True)
class Extent:
    """Along what a value varies."""

    rows: bool
    columns: bool


@dataclass(frozen=True)
class Extents:
    """Extents of the operands of a straight line of steps. inputs: those of what is read."""

    inputs: tuple[Extent, ...]
    steps: tuple[AnyStep, ...]

    def of(self, operand: Operand) -> Extent:
        if isinstance(operand, Scalar | Number):
            return Extent(False, False)
        if isinstance(operand, Column):
            return Extent(False, True)
        if isinstance(operand, RowNumber):
            return Extent(True, False)
        return (self.inputs if isinstance(operand, Load) else self.made)[operand.index]

    @cached_property
    def made(self) -> tuple[Extent, ...]:
        """Extents of the steps' values."""
        found: list[Extent] = []
        for step in self.steps:
            known = [found[o.index] if isinstance(o, Chain) else self.of(o) for _, o in step.operands]
            found.append(Extent(any(k.rows for k in known), isinstance(step, Step) and any(k.columns for k in known)))
        return tuple(found)


_ABSORBED = {Join.SUM: "mul", Join.MAX: "abs"}
"""The op whose result is not needed to reduce it."""


@dataclass(frozen=True)
class RowProgram:
    """A computation for each row, and its outputs."""

    inputs: tuple[View, ...]  # by the numbers of ``Load``
    steps: tuple[AnyStep, ...]  # value k is the result of step k
    stores: tuple[Store, ...]  # what is written of each row
    sums: tuple[ColumnSum, ...] = ()  # what is written of all rows together
    late: frozenset[int] = frozenset()  # numbers of the stores that wait for the last phase
    indices: tuple[View, ...] = ()  # integers of which there is one a row, the numbers of rows elsewhere

    @cached_property
    def swapped(self) -> tuple[Pairs, ...]:
        """The pairs of columns that steps exchange."""
        found = (step for step in self.steps if step.op_name == SWAP)
        return tuple(dict.fromkeys(Pairs(**dict(step.attributes)) for step in found))

    @cached_property
    def all_pairs(self) -> tuple[Pairs, ...]:
        """The pairs of columns of steps and of inputs."""
        of_inputs = (view.unit.pairs for view in self.inputs if view.unit.pairs is not None)
        return tuple(dict.fromkeys((*self.swapped, *of_inputs)))

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        """The ranks whose memory is read or written, by each table. Kernels meet by the first."""
        places = (view.place for view in self.all_views)
        return tuple(dict.fromkeys(place.group for place in places if isinstance(place, OfRank)))

    @property
    def all_views(self) -> tuple[View, ...]:
        """Views that are read and written, every part."""
        return tuple(part for view in (*self.inputs, *(s.view for s in self.stores)) for part in view.parts)

    @property
    def numbers_columns(self) -> bool:
        """True if a step is given the number of its element's column, or finds an element by it."""
        numbered = (isinstance(o, Column) for step in self.steps for _, o in step.operands)
        return any(numbered) or any(isinstance(step, Pick) for step in self.steps)

    @property
    def numbers_rows(self) -> bool:
        """True if a step is given the number of its element's row."""
        return any(isinstance(o, RowNumber) for step in self.steps for _, o in step.operands)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The distinct one-element operands in order of first use."""
        found = (o for step in self.steps for _, o in step.operands if isinstance(o, Scalar))
        return tuple(dict.fromkeys(found))

    @cached_property
    def _extents(self) -> Extents:
        return Extents(tuple(Extent(view.rows, view.columns) for view in self.inputs), self.steps)

    def extent(self, operand: Operand) -> Extent:
        return self._extents.of(operand)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Extents of the steps' values."""
        return self._extents.made

    @cached_property
    def earliest(self) -> tuple[int, ...]:
        """The first phase in which each step's value can be known; a reduction's is that after its input's."""
        found: list[int] = []
        for step in self.steps:
            before = max((found[o.index] for _, o in step.operands if isinstance(o, Chain)), default=0)
            found.append(before + isinstance(step, Reduce))
        return tuple(found)

    @cached_property
    def phase(self) -> tuple[int, ...]:
        """The phase in which each step is computed: the last that serves all who read it, as values that
        wait take registers. What is written is computed, and written, as early as can be."""
        found = [self.last] * len(self.steps)
        for store in self.stores:
            index = store.value.index
            found[index] = min(found[index], self.earliest[index])
        for o in (o for s in self.sums for o in s.factors if isinstance(o, Chain)):
            found[o.index] = min(found[o.index], self.earliest[o.index])
        for k in reversed(range(len(self.steps))):
            reduction = isinstance(self.steps[k], Reduce)
            found[k] = self.earliest[k] if reduction else found[k]
            for _, o in self.steps[k].operands:
                if isinstance(o, Chain):
                    found[o.index] = min(found[o.index], found[k] - reduction)
        return tuple(found)

    @cached_property
    def known(self) -> tuple[int, ...]:
        """The phase at whose beginning each value of one per row is made."""
        found: list[int] = []
        for k, step in enumerate(self.steps):
            made = max((found[o.index] for _, o in step.operands if isinstance(o, Chain)), default=0)
            found.append(max(made, self.earliest[k], self._awaited(k, made)))
        return tuple(found)

    def _awaited(self, k: int, made: int) -> int:
        """The phase until which a value waits for memory, which answers late: an element that is picked is read a phase
        before it is needed, and used in the next, where there are so many. made: the phase of its last operand."""
        step = self.steps[k]
        picked = any(isinstance(o, Chain) and isinstance(self.steps[o.index], Pick) for _, o in step.operands)
        used = min(made + 1, self.phase[k]) if picked else 0
        return max(used, self.phase[k] - 1) if isinstance(step, Pick) else used

    def picked_in(self, number: int) -> tuple[int, ...]:
        """The phases at whose beginning single elements of an input are read."""
        of = ((k, step) for k, step in enumerate(self.steps) if isinstance(step, Pick))
        return tuple(self.known[k] for k, step in of if step.input.index == number)

    @cached_property
    def read_whole(self) -> tuple[View, ...]:
        """Inputs with an element for each one of the rows."""
        whole = (view for view in self.inputs if view.rows and view.columns)
        return tuple(view for view in whole if view.unit.pairs is None and not view.unit.period)

    @cached_property
    def periods(self) -> tuple[int, ...]:
        """Columns after which elements of an input come again, each number once."""
        return tuple(dict.fromkeys(view.unit.period for view in self.inputs if view.unit.period))

    @cached_property
    def written_whole(self) -> tuple[View, ...]:
        """Outputs with an element for each one of the rows; scales of blocks, and values of parts, are beside them."""
        whole = (s for s in self.stores if not s.amax and s.scales_of is None and not s.view.unit.part)
        return tuple(s.view for s in whole if self.extents[s.value.index].columns)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Elements that share a scale, by each store that has some, and those of parts."""
        return tuple(dict.fromkeys((*(store.block_size for store in self.stores if store.block_size), *self.parts)))

    @cached_property
    def one_a_part(self) -> frozenset[Operand]:
        """Values of which the elements of a part have one."""
        return of_parts(self.steps, lambda o: self.extent(o).columns) if self.parts else frozenset()

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Columns of the parts of rows that steps join."""
        return tuple(dict.fromkeys(size for size in map(part_of, self.steps) if size))

    @cached_property
    def last(self) -> int:
        """The number of the last phase."""
        return max(self.earliest, default=0)

    def store_phase(self, number: int) -> int:
        """The phase in which a store of a value that varies over columns writes."""
        return self.last if number in self.late else self.phase[self.stores[number].value.index]

    def stored_in(self, phase: int) -> Iterator[tuple[int, Store]]:
        """The stores of values that vary over columns, with their numbers."""
        for number, store in enumerate(self.stores):
            if self.extents[store.value.index].columns and self.store_phase(number) == phase:
                yield number, store

    def reduced_after(self, phase: int, join: Join) -> list[int]:
        """The steps that join what a phase knows of a row in this way."""
        return [k for k in self.reductions(join) if self.phase[k] == phase + 1]

    def reductions(self, join: Join) -> list[int]:
        """All steps that join elements of a row in this way."""
        return [k for k in self._reductions if self.steps[k].join is join]

    @cached_property
    def _reductions(self) -> tuple[int, ...]:
        return tuple(k for k, step in enumerate(self.steps) if isinstance(step, Reduce))

    def joined(self, k: int) -> tuple[Operand, ...]:
        """Operands that reduction number k goes through: of the sum of a product that is not rounded the two factors,
        which are multiplied as they are added; of the largest of magnitudes the values that these are of."""
        reduction = self.steps[k]
        made = self.steps[reduction.input.index] if isinstance(reduction.input, Chain) else None
        if made is None or made.rounded is not None or made.op_name != _ABSORBED[reduction.join]:
            return (reduction.input,)
        operands = tuple(o for _, o in made.operands)
        arrays = all(isinstance(o, Chain | Load) and self.extent(o).columns for o in operands)
        return operands if arrays else (reduction.input,)

    def is_of_magnitudes(self, k: int) -> bool:
        """True if reduction number k, a largest one, is of the magnitudes of what it goes through."""
        return self.joined(k) != (self.steps[k].input,)

    def summed_in(self, phase: int) -> Iterator[tuple[int, ColumnSum]]:
        """The sums over all rows to which a phase adds, with their numbers."""
        for number, s in enumerate(self.sums):
            if max((self.phase[o.index] for o in s.factors if isinstance(o, Chain)), default=0) == phase:
                yield number, s

    def wanted(self, phase: int) -> Iterator[Operand]:
        """The values that a phase stores, reduces and sums."""
        yield from (store.value for _, store in self.stored_in(phase))
        yield from (o for join in Join for k in self.reduced_after(phase, join) for o in self.joined(k))
        yield from (o for _, s in self.summed_in(phase) for o in s.factors)

    @cached_property
    def elementwise(self) -> tuple[AnyStep, ...]:
        """The steps of which there is a value for each element, without those that reductions absorb."""
        needed = {o.index for phase in range(self.last + 1) for o in self.elements(phase) if isinstance(o, Chain)}
        return tuple(self.steps[k] for k in sorted(needed))

    def held(self, again: frozenset[Chain | Load] = frozenset()) -> tuple[tuple[Chain | Load, ...], ...]:
        """Values of one element that a thread keeps from the phases before, for each phase but the first.
        again: what is rather read or worked out once more."""
        return tuple(self._held(phase, again) for phase in range(1, self.last + 1))

    def _held(self, phase: int, again: frozenset[Chain | Load]) -> tuple[Chain | Load, ...]:
        before = {o for p in range(phase) for o in self.elements(p)} - again
        kept = {}
        for later in range(phase, self.last + 1):
            needed = self.elements(later, before)
            kept |= dict.fromkeys(o for o in needed if o in before and self.extent(o).rows)
        return tuple(sorted(kept, key=lambda o: (isinstance(o, Chain), o.index)))

    def elements(self, phase: int, known: Iterable[Chain | Load] = ()) -> tuple[Chain | Load, ...]:
        """All elementwise values that a phase needs, in an order in which each follows its operands; those
        of `known` as they are, others with what they are computed from. Values that are one a column
        are computed or read again in each phase and never held: they come with all they need."""
        known = set(known)
        found: dict[Chain | Load, None] = {}

        def visit(o: Operand) -> None:
            if not isinstance(o, Chain | Load) or o in found or not self.extent(o).columns:
                return
            if isinstance(o, Chain) and not (o in known and self.extent(o).rows):
                for _, operand in self.steps[o.index].operands:
                    visit(operand)
            found[o] = None

        for o in self.wanted(phase):
            visit(o)
        return tuple(found)
