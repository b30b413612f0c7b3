"""Printing of elementwise values, as one phase computes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphfuse.codegen import pieces
from graphfuse.codegen.expressions import expression, rounded
from graphfuse.codegen.per_row import member
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.ops import OPS
from graphfuse.rows.pairs import Pairs
from graphfuse.rows.program import DIVIDES, OF_PARTS, SWAP, RowProgram, exchanges, part_of
from graphfuse.rows.steps import Chain, Column, Join, Load, Operand, RowNumber, Step


def packed_type(plan: PhasePlan, o: Chain | Load) -> str:
    """C++ type of a piece of a packed value."""
    elements = plan.elements_of(plan.program.inputs[o.index]) if isinstance(o, Load) else plan.piece
    return f"gf::Bytes<{plan.dtype(o).nbytes(elements)}>"


def held(plan: PhasePlan) -> Iterator[str]:
    """The struct Held, with the values of a piece that are kept between phases."""
    yield ""
    yield "/// What is kept of a piece between phases."
    yield "struct Held {"
    for o in sorted({o for kept in plan.kept for o in kept}, key=str):
        packed = plan.dtype(o) is not None
        yield f"  {packed_type(plan, o)} {_name(o)};" if packed else f"  float {_name(o)}[PIECE];"
    swaps = dict.fromkeys(o for phase in plan.phases for o in plan.exchanged(phase))
    yield from (f"  float {_exchanged(o)}[PIECE];  // of the other piece" for o in swaps)
    yield "};"


def _exchanged(o: Chain) -> str:
    """Member of Held with the values for a swap from the thread's other piece."""
    return f"s{o.index}"


def _name(o: Chain | Load) -> str:
    """Name of the struct member that holds a value."""
    return f"{'l' if isinstance(o, Load) else 'v'}{o.index}"


@dataclass(frozen=True)
class Elements:
    """Printer of the elementwise values of one phase."""

    plan: PhasePlan
    phase: int

    @property
    def program(self) -> RowProgram:
        return self.plan.program

    @property
    def known(self) -> tuple[Chain | Load, ...]:
        """Values kept from earlier phases."""
        return self.plan.kept[self.phase]

    def array(self, o: Chain | Load) -> str:
        """Name of the float32 array of a piece of a value."""
        if isinstance(o, Load):
            return f"l{o.index}"
        return f"held.v{o.index}" if o in self.known and o not in self.plan.packed else f"a{o.index}"

    def pack(self, o: Chain | Load) -> str:
        """C++ expression of a piece of a packed value."""
        if o in self.known:
            return f"held.{_name(o)}"
        return f"p{o.index}" if isinstance(o, Chain) else self._read(o)

    def _read(self, o: Load) -> str:
        return f"{'rows' if self.program.inputs[o.index].rows else 'columns'}.r{o.index}"

    def source(self) -> Iterator[str]:
        """Statements that read and compute the values, and keep those that later phases need."""
        return self._source(self._loops, self.plan.kept[self.phase + 1] if self.phase < self.program.last else ())

    def exchange(self) -> Iterator[str]:
        """The function exchange, which gives each of a thread's two pieces the values of the other one for swaps."""
        arguments = "const Rows& rows, const Columns& columns, const Held& held, const Operands& s, const PerRow& p"
        for swap in self.plan.exchanged(self.phase):
            ((_, value),) = self._operands(swap)
            before = self._loops[: self._loops.index((swap,))]
            yield f"  GF_DEVICE static void other{swap.index}(const Row& row, Index at, {arguments},"
            yield "                               float (&other)[PIECE]) {"
            yield from self._source(before, ())
            yield from pieces.each([f"other[i] = {self.array(value)}[i];"])
            yield "  }"
        yield "  GF_DEVICE static void exchange(const Row& row, Index second, Rows (&rows)[2],"
        yield "                                 Columns (&columns)[2], Held (&held)[2], const Operands& s,"
        yield "                                 const PerRow& p) {"
        for kind, varies in (("rows", True), ("columns", False)):
            same = (i for i in self.plan.reads(self.phase, varies) if self.plan.has_both(i))
            yield from (f"    {kind}[1].r{i} = {kind}[0].r{i};" for i in same)
        for swap in self.plan.exchanged(self.phase):
            name = _exchanged(swap)
            for k, at in enumerate(("0", "second")):
                given = f"row, {at}, rows[{k}], columns[{k}], held[{k}], s, p"
                yield f"    other{swap.index}({given}, held[{1 - k}].{name});"
            yield from pieces.each([f"held[0].{name}[i] = -held[0].{name}[i];"])
        yield "  }"

    def _source(self, loops: Sequence[Sequence[Chain]], kept: Sequence[Chain | Load]) -> Iterator[str]:
        for o in self.plan.elements(self.phase):
            if o in self.known:
                yield from self._unpack(o, f"held.{_name(o)}", again=self.plan.unpack_again)
            elif isinstance(o, Load):
                yield from self._unpack(o, self._read(o))
                if o in kept:
                    yield f"    held.l{o.index} = {self._read(o)};"
        if any(o == Column() for loop in loops for k in loop for _, o in self._operands(k)):
            yield "    const float column = float((row.thread + at) * PIECE);"
        arrays = [o for o in self._arrays() if o not in self.known and any(o in loop for loop in loops)]
        yield from (f"    float a{o.index}[PIECE];" for o in arrays)
        for loop in loops:
            if self._exchanges(loop[0]):
                swaps = self.program.steps[loop[0].index].op_name == SWAP
                yield from (self._swapped if swaps else self._joined)(loop[0], kept)
                continue
            if self._is_one_a_part(loop[0]):
                yield from self._worked_out_once(loop[0], kept)
                continue
            yield from self._quotients(loop[0])
            lines = []
            for o in loop if loop[0] not in self.plan.paired else ():  # paired steps are packed below
                step = self.program.steps[o.index]
                text = f"quotients{o.index}[i]" if step.op_name in DIVIDES else self._expression(step, loop)
                lines.append(f"const float v{o.index} = {text if o in self.plan.packed else rounded(step, text)};")
                lines += [f"a{o.index}[i] = v{o.index};"] * (o in arrays)
                lines += [f"held.v{o.index}[i] = v{o.index};"] * (o in kept and o not in self.plan.packed)
            yield from pieces.each(lines) if lines else ()
            if (o := loop[-1]) in self.plan.packed:
                ctype = self.plan.dtype(o).facts.ctype
                yield f"    const {packed_type(self.plan, o)} p{o.index} = {self._packed(o, ctype)};"
                yield f"    gf::unpack<{ctype}>(p{o.index}, a{o.index});"
                if o in kept:
                    yield f"    held.v{o.index} = p{o.index};"

    def _packed(self, o: Chain, ctype: str) -> str:
        """C++ expression that packs a value, or computes it from packed operands."""
        if o not in self.plan.paired:
            return f"gf::pack<{ctype}>(a{o.index})"
        op = OPS[self.program.steps[o.index].op_name]
        operands = [self.pack(operand) for _, operand in self._operands(o)]
        return f"{op.packed}<{ctype}>({', '.join(sorted(operands) if op.commutative else operands)})"

    def _unpack(self, o: Chain | Load, source: str, again: bool = False) -> Iterator[str]:
        dtype = self.plan.dtype(o)
        if dtype is not None:
            if again:
                yield f"    gf::forget_unpacked({source});"
            yield f"    float {self.array(o)}[PIECE];"
            how = self.plan.unpack(self.program.inputs[o.index]) if isinstance(o, Load) else "unpack"
            yield f"    gf::{how}<{dtype.facts.ctype}>({source}, {self.array(o)});"

    @cached_property
    def _loops(self) -> tuple[tuple[Chain, ...], ...]:
        """Steps grouped into loops over the elements of a piece. A packed value ends a loop. A paired step, or another
        one that needs whole pieces, has a loop alone. A division begins a loop."""
        loops: list[list[Chain]] = [[]]
        for o in self.plan.elements(self.phase):
            if isinstance(o, Chain) and o not in self.known:
                alone = self._exchanges(o) or self._is_one_a_part(o) or o in self.plan.paired
                loops += [[]] * (alone or self.program.steps[o.index].op_name in DIVIDES)
                loops[-1] = [*loops[-1], o]
                if alone or o in self.plan.packed:
                    loops.append([])
        return tuple(tuple(loop) for loop in loops if loop)

    def _exchanges(self, o: Chain) -> bool:
        """True if a value depends on other elements of its row, perhaps of other threads."""
        return exchanges(self.program.steps[o.index])

    def _is_one_a_part(self, o: Chain) -> bool:
        """True if all elements of a piece have the same value, and it is not packed."""
        return o in self.program.one_a_part and o not in self.plan.packed

    def _worked_out_once(self, o: Chain, kept: Sequence[Chain | Load]) -> Iterator[str]:
        step = self.program.steps[o.index]
        yield f"    const float v{o.index} = {rounded(step, self._expression(step, (), '0'))};"
        yield from pieces.each([f"a{o.index}[i] = v{o.index};", *[f"held.v{o.index}[i] = v{o.index};"] * (o in kept)])

    def _swapped(self, o: Chain, kept: Sequence[Chain | Load]) -> Iterator[str]:
        """Statements that get the other elements of pairs, perhaps from other lanes."""
        if self.plan.own_pairs:
            lines = [f"a{o.index}[i] = held.{_exchanged(o)}[i];"]
            yield from pieces.each([*lines, *([f"held.v{o.index}[i] = a{o.index}[i];"] * (o in kept))])
            return
        step = self.program.steps[o.index]
        pairs = Pairs(**dict(step.attributes))
        how = "neighbours" if pairs.interleaved else "halves"
        whole = str(pairs.whole(self.plan.columns)).lower()
        number = pairs.columns if pairs.interleaved else f"{pairs.count // self.plan.piece}, {whole}"
        ((_, value),) = step.operands
        piece = pairs.piece(self.plan.piece)
        yield f"    gf::swap_{how}<{number}>({piece}, {self.array(value)}, a{o.index});"
        if o in kept:
            yield from pieces.each([f"held.v{o.index}[i] = a{o.index}[i];"])

    def _quotients(self, o: Chain) -> Iterator[str]:
        """Statements that compute a piece of quotients, if a step divides, again by division if one may be inexact."""
        step = self.program.steps[o.index]
        if step.op_name not in DIVIDES:
            return
        yield f"    float quotients{o.index}[PIECE];"
        yield "    {"
        yield "      bool exact = true;"
        yield from pieces.each([f"quotients{o.index}[i] = {self._expression(step, ())};"], "      ")
        yield "      if (!exact) {"
        plain = replace(step, op_name="div", operands=step.operands[:2])
        yield from pieces.each([f"quotients{o.index}[i] = {self._expression(plain, ())};"], "        ")
        yield "      }"
        yield "    }"

    def _joined(self, o: Chain, kept: Sequence[Chain | Load]) -> Iterator[str]:
        """Statements that reduce each part, across lanes, with the result for all its elements."""
        step = self.program.steps[o.index]
        how = "Add" if step.op_name == OF_PARTS[Join.SUM] else "Max"
        ((_, value),) = step.operands
        yield f"    gf::join_part<gf::{how}, {part_of(step)}>({self.array(value)}, a{o.index});"
        if o in kept:
            yield from pieces.each([f"held.v{o.index}[i] = a{o.index}[i];"])

    def _operands(self, o: Chain) -> tuple[tuple[str, Operand], ...]:
        return self.program.steps[o.index].operands

    def _arrays(self) -> tuple[Chain, ...]:
        """Values that are needed as an array of a piece."""
        wanted = [*self.program.wanted(self.phase)]
        wanted += [o for o in self.plan.elements(self.phase) if o in self.plan.packed]
        wanted += self._outlasting()
        wanted += [loop[0] for loop in self._loops if self._exchanges(loop[0]) or self._is_one_a_part(loop[0])]
        return tuple(dict.fromkeys(o for o in wanted if isinstance(o, Chain)))

    def _outlasting(self) -> Iterator[Chain]:
        """Values that a later loop reads than the one that computes them."""
        done: set[Operand] = set()
        for loop in self._loops:
            yield from (o for k in loop for _, o in self._operands(k) if o in done)
            done |= set(loop)

    def _expression(self, step: Step, loop: Sequence[Chain], at: str = "i") -> str:
        def operand(o: Operand) -> str:
            if isinstance(o, RowNumber):
                return "row.index"
            if isinstance(o, Column):
                return f"(gf::u32(row.thread + at) * PIECE + {at})" if o.integer else "(column + float(i))"
            if not self.program.extent(o).columns:
                return member(self.program, o, "p.", pieces.index(self.plan))
            return f"v{o.index}" if o in loop else f"{self.array(o)}[{at}]"

        return expression(step, operand)
