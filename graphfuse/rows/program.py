"""Row programs: what a fused kernel computes for each row of tensors viewed as rows x columns.

A program is a straight line of steps. Most are pointwise ops, on values of one per element, column, row or tensor.
`Reduce` makes one value of a row. It divides the program into phases: steps before the reduction, and steps that need
its result. Values may also be summed over all rows. Nothing here depends on how rows are spread over threads.
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
"""Steps that reduce each part of a row, with the result for every element of the part."""


@dataclass(frozen=True)
class StepOp:
    """An op that only steps of row programs have. cuda, cost: as in ``ops.Op``."""

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
"""Ops of steps besides the op table's.

fma, fnma: a * b + c and c - a * b, rounded once. exp2_approx: 2^input. SWAP: the other column of the pair (see
``Pairs``), negated for the first column, 0 without a pair. DIVISOR, QUOTIENT: the reciprocal of b, and a / b by it.
BELOW, REST, NARROW_QUOTIENT: the same by a reciprocal in two parts (see ``division``). RANDOM: 1 if the random number
of the element's row and column is at least `least`, else 0. OF_PARTS: the sum or maximum of a part, `size` columns."""
DIVIDES = (QUOTIENT, NARROW_QUOTIENT)


def cost_of(step: AnyStep) -> Cost:
    """Cost of a step for each element."""
    if isinstance(step, Reduce | Pick):
        return Cost.ARITHMETIC
    return (FUSED.get(step.op_name) or OPS[step.op_name]).cost


def of_parts(steps: Sequence[AnyStep], has_columns: Callable[[Operand], bool]) -> frozenset[Operand]:
    """Values that vary along a row and are the same for all elements of a part."""
    found: set[Operand] = set()
    for k, step in enumerate(steps):
        read = [o for _, o in step.operands]
        one = all(o in found or not has_columns(o) for o in read) and not found.isdisjoint(read)
        if part_of(step) or isinstance(step, Step) and one:
            found.add(Chain(k))
    return frozenset(found)


def part_of(step: AnyStep) -> int:
    """Columns of the parts that a step reduces; 0 for other steps."""
    return dict(step.attributes)["size"] if isinstance(step, Step) and step.op_name in OF_PARTS.values() else 0


def exchanges(step: AnyStep) -> bool:
    """True for a step whose result depends on other columns of the row."""
    return step.op_name == SWAP or part_of(step) > 0


@dataclass(frozen=True)
class Store:
    """A value that is written."""

    view: View
    value: Chain
    block_size: int = 0  # elements that share a scale; 0 if the output is not quantized in blocks
    block_scale: View | None = None  # the output of scales, columns / block_size per row
    amax: bool = False  # the view is one element, the largest magnitude of all
    scales_of: data_type | None = None  # only scales are written, those of elements of this type


@dataclass(frozen=True)
class ColumnSum:
    """A written sum over all rows, of a value or of the product of two: one element per column."""

    view: View
    factors: tuple[Operand, ...]


@dataclass(frozen=True)
class Extent:
    """The axes along which a value varies."""

    rows: bool
    columns: bool


@dataclass(frozen=True)
class Extents:
    """Extents of the operands of a straight line of steps. inputs: extents of the inputs."""

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
"""Op that a reduction computes itself, so that its result is not needed."""


@dataclass(frozen=True)
class RowProgram:
    """A computation for each row, and its outputs."""

    inputs: tuple[View, ...]  # by the numbers of ``Load``
    steps: tuple[AnyStep, ...]  # value k is the result of step k
    stores: tuple[Store, ...]  # outputs of each row
    sums: tuple[ColumnSum, ...] = ()  # outputs of all rows together
    late: frozenset[int] = frozenset()  # numbers of the stores that are written in the last phase
    indices: tuple[View, ...] = ()  # integers, one per row: numbers of the rows of other tensors

    @cached_property
    def swapped(self) -> tuple[Pairs, ...]:
        """The pairs of columns that steps swap."""
        found = (step for step in self.steps if step.op_name == SWAP)
        return tuple(dict.fromkeys(Pairs(**dict(step.attributes)) for step in found))

    @cached_property
    def all_pairs(self) -> tuple[Pairs, ...]:
        """The pairs of columns of steps and of inputs."""
        of_inputs = (view.unit.pairs for view in self.inputs if view.unit.pairs is not None)
        return tuple(dict.fromkeys((*self.swapped, *of_inputs)))

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        """The groups of ranks whose memory is read or written, one per table. Kernels synchronize by the first."""
        places = (view.place for view in self.all_views)
        return tuple(dict.fromkeys(place.group for place in places if isinstance(place, OfRank)))

    @property
    def all_views(self) -> tuple[View, ...]:
        """All views that are read or written, including the tensors that follow in a joined view."""
        return tuple(part for view in (*self.inputs, *(s.view for s in self.stores)) for part in view.parts)

    @property
    def numbers_columns(self) -> bool:
        """True if a step reads the number of its element's column, or picks an element by it."""
        numbered = (isinstance(o, Column) for step in self.steps for _, o in step.operands)
        return any(numbered) or any(isinstance(step, Pick) for step in self.steps)

    @property
    def numbers_rows(self) -> bool:
        """True if a step reads the number of its element's row."""
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
        """The first phase in which each step's value can be known. A reduction's result belongs to the next phase."""
        found: list[int] = []
        for step in self.steps:
            before = max((found[o.index] for _, o in step.operands if isinstance(o, Chain)), default=0)
            found.append(before + isinstance(step, Reduce))
        return tuple(found)

    @cached_property
    def phase(self) -> tuple[int, ...]:
        """The phase in which each step is computed: the last possible one, because values that wait take registers.
        Outputs are computed and written as early as possible."""
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
        """The phase at whose beginning each value of one per row is computed."""
        found: list[int] = []
        for k, step in enumerate(self.steps):
            made = max((found[o.index] for _, o in step.operands if isinstance(o, Chain)), default=0)
            found.append(max(made, self.earliest[k], self._awaited(k, made)))
        return tuple(found)

    def _awaited(self, k: int, made: int) -> int:
        """The phase until which a value waits, to hide memory latency: a picked element is read a phase before it
        is needed, and used in the next, if there are as many phases. made: the phase of its last operand."""
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
        """Inputs with an element for each column of each row."""
        whole = (view for view in self.inputs if view.rows and view.columns)
        return tuple(view for view in whole if view.unit.pairs is None and not view.unit.period)

    @cached_property
    def periods(self) -> tuple[int, ...]:
        """Columns after which elements of an input repeat; each number once."""
        return tuple(dict.fromkeys(view.unit.period for view in self.inputs if view.unit.period))

    @cached_property
    def written_whole(self) -> tuple[View, ...]:
        """Outputs with an element for each column of each row, without scales of blocks and values of parts."""
        whole = (s for s in self.stores if not s.amax and s.scales_of is None and not s.view.unit.part)
        return tuple(s.view for s in whole if self.extents[s.value.index].columns)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes of quantized stores, and columns of parts; each number once."""
        return tuple(dict.fromkeys((*(store.block_size for store in self.stores if store.block_size), *self.parts)))

    @cached_property
    def one_a_part(self) -> frozenset[Operand]:
        """Values that vary along a row and are the same for all elements of a part."""
        return of_parts(self.steps, lambda o: self.extent(o).columns) if self.parts else frozenset()

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Columns of the parts that steps reduce; each number once."""
        return tuple(dict.fromkeys(size for size in map(part_of, self.steps) if size))

    @cached_property
    def last(self) -> int:
        """The number of the last phase."""
        return max(self.earliest, default=0)

    def store_phase(self, number: int) -> int:
        """The phase of a store whose value varies over columns."""
        return self.last if number in self.late else self.phase[self.stores[number].value.index]

    def stored_in(self, phase: int) -> Iterator[tuple[int, Store]]:
        """The stores of a phase whose values vary over columns, with their numbers."""
        for number, store in enumerate(self.stores):
            if self.extents[store.value.index].columns and self.store_phase(number) == phase:
                yield number, store

    def reduced_after(self, phase: int, join: Join) -> list[int]:
        """The reductions by `join` whose inputs this phase computes."""
        return [k for k in self.reductions(join) if self.phase[k] == phase + 1]

    def reductions(self, join: Join) -> list[int]:
        """All reductions of rows by `join`."""
        return [k for k in self._reductions if self.steps[k].join is join]

    @cached_property
    def _reductions(self) -> tuple[int, ...]:
        return tuple(k for k, step in enumerate(self.steps) if isinstance(step, Reduce))

    def joined(self, k: int) -> tuple[Operand, ...]:
        """Operands that the reduction of step k reads: its input, or the operands of the op that it absorbs.

        A sum absorbs a product that is not rounded, as multiply-adds; a maximum absorbs magnitudes."""
        reduction = self.steps[k]
        made = self.steps[reduction.input.index] if isinstance(reduction.input, Chain) else None
        if made is None or made.rounded is not None or made.op_name != _ABSORBED[reduction.join]:
            return (reduction.input,)
        operands = tuple(o for _, o in made.operands)
        arrays = all(isinstance(o, Chain | Load) and self.extent(o).columns for o in operands)
        return operands if arrays else (reduction.input,)

    def is_of_magnitudes(self, k: int) -> bool:
        """True if step k, a maximum, takes the magnitudes of its operands (see `joined`)."""
        return self.joined(k) != (self.steps[k].input,)

    def summed_in(self, phase: int) -> Iterator[tuple[int, ColumnSum]]:
        """The sums over all rows that a phase accumulates, with their numbers."""
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
        """The steps with a value for each element, without those that reductions absorb."""
        needed = {o.index for phase in range(self.last + 1) for o in self.elements(phase) if isinstance(o, Chain)}
        return tuple(self.steps[k] for k in sorted(needed))

    def held(self, again: frozenset[Chain | Load] = frozenset()) -> tuple[tuple[Chain | Load, ...], ...]:
        """Elementwise values that a thread keeps from earlier phases, for each phase but the first.
        again: values that are read or computed again instead."""
        return tuple(self._held(phase, again) for phase in range(1, self.last + 1))

    def _held(self, phase: int, again: frozenset[Chain | Load]) -> tuple[Chain | Load, ...]:
        before = {o for p in range(phase) for o in self.elements(p)} - again
        kept = {}
        for later in range(phase, self.last + 1):
            needed = self.elements(later, before)
            kept |= dict.fromkeys(o for o in needed if o in before and self.extent(o).rows)
        return tuple(sorted(kept, key=lambda o: (isinstance(o, Chain), o.index)))

    def elements(self, phase: int, known: Iterable[Chain | Load] = ()) -> tuple[Chain | Load, ...]:
        """All elementwise values that a phase needs, each after its operands.

        Operands of values in `known` are left out. Values of one per column are never held: each phase computes or
        reads them again, so their operands are included."""
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
