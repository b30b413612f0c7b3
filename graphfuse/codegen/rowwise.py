"""Prints a row program as C++: what a kernel template for rows includes as its generated part.

The template spreads rows over threads and reduces; printed here is all that depends on the program:
kernel parameters, addresses, what is read, computed, kept and written in each phase. Names of the
user's tensors never enter the text.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphfuse.codegen.copies import LEAST, Copied, Copies
from graphfuse.codegen.pointwise import argument, expression, parameter_type
from graphfuse.dtypes import data_type
from graphfuse.engine import Address, Argument, Constant, Scratch
from graphfuse.pointwise import Chain, Load, Operand, Scalar, Step
from graphfuse.rowwise import AMAX, GRADIENT, INVERSE_RMS, NORMALIZE, ROW_MEAN, RowProgram, Store, View, reduced

ACCESS = 16
"""Bytes of the widest memory access."""

_FIRST_LINE = 48
"""Bytes of parameters in the line of the constant cache in which they begin, on SM90."""

_LIGHT = ("add", "mul", "neg", "scale", "sub")


def _plain(store: Store) -> bool:
    return not store.amax and not store.block_size


def _name(o: Chain | Load) -> str:
    """Of a member that holds a value."""
    return f"{'l' if isinstance(o, Load) else 'v'}{o.index}"


def access(view: View, elements: int) -> int:
    """Bytes of the widest access that every piece of `elements` elements is aligned for."""
    strides = (view.dtype.nbytes(abs(stride)) for stride in view.row_strides)
    return math.gcd(ACCESS, view.dtype.nbytes(elements), view.alignment, *strides)


def divider(divisor: int) -> tuple[int, int]:
    """Multiplier and shift by which ``gf::divide`` divides numbers below 2^31: with 2^(s-1) < divisor <= 2^s the
    product errs by less than 2^(31+s) / n."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


@dataclass(frozen=True)
class Rows:
    """A row program and how a kernel goes through rows.

    extents: of the row axes. piece: elements that a thread takes together. resident: what the phases
    after the first need is kept in registers; otherwise it is read and computed again.
    unpack_again: kept values of few bits are unpacked for each phase. stages: of a kernel whose threads take row
    after row, how many rows have room in shared memory, into which they are copied before their turn: 1 for
    none; 0 of a kernel whose threads take one row each.
    """

    program: RowProgram
    extents: tuple[int, ...]
    columns: int
    piece: int
    resident: bool
    unpack_again: bool = False
    stages: int = 0

    @property
    def source(self) -> str:
        """The structs Row, Operands, PerRow, Held and Phase0 to Phase2, and the macros KERNEL_PARAMETERS, ROW
        (initializes a Row from `index` and `thread`), ROW_LATER (assigns the rest of it) and OPERANDS."""
        return "\n".join(self._lines()) + "\n"

    # Which input is read how

    def _known(self, phase: int) -> tuple[Chain | Load, ...]:
        return self._held_for[phase - 1] if phase and self.resident else ()

    @cached_property
    def _held_for(self) -> tuple[tuple[Chain | Load, ...], ...]:
        return self.program.held(self._again)

    @property
    def _again(self) -> frozenset[Chain | Load]:
        """What is not kept though a later phase needs it: what is read, for it lies in shared memory or the L1, and
        what takes one operation to work out from that."""
        if not self.stages:
            return frozenset()
        program = self.program

        def varies(o: Operand) -> bool:
            return isinstance(o, Chain) and program.shapes[o.index].rows and program.shapes[o.index].columns

        light = (
            Chain(k)
            for k, step in enumerate(program.steps)
            if step.op_name in _LIGHT and step.rounded is None and not any(varies(o) for _, o in step.operands)
        )
        return frozenset([*light, *map(Load, range(len(program.inputs)))])

    def elements(self, phase: int) -> tuple[Chain | Load, ...]:
        return self.program.elements(phase, self._known(phase))

    def reads(self, phase: int, rows: bool) -> tuple[int, ...]:
        """Inputs that a phase reads: those that vary over rows, or those that do not."""
        inputs, known = self.program.inputs, self._known(phase)
        found = (o.index for o in self.elements(phase) if isinstance(o, Load) and o not in known)
        return tuple(sorted(i for i in found if inputs[i].rows == rows))

    def read_bytes(self, phase: int, rows: bool) -> int:
        """Of each element, what a phase reads."""
        return sum(self.program.inputs[i].dtype.bits // 8 for i in self.reads(phase, rows))

    @property
    def held_bytes(self) -> int:
        """Of each element, what is kept between phases."""
        held = (self._held_for or ((),)) if self.resident else ((),)
        return max(sum(self._bytes(o) for o in kept) for kept in held)

    def _bytes(self, o: Chain | Load) -> int:
        dtype = self._dtype(o)
        return 4 if dtype is None else dtype.bits // 8

    def _dtype(self, o: Chain | Load) -> data_type | None:
        """The type as which a value is packed: an input as it is read, one that is rounded if it is kept or stored
        so. None for float32, an array."""
        if isinstance(o, Load):
            return self.program.inputs[o.index].dtype
        return self.program.steps[o.index].rounded if o in self._packed else None

    @cached_property
    def _packed(self) -> frozenset[Chain]:
        """Rounded values that are kept or stored as what they are rounded to."""
        program, kept = self.program, {o for p in range(1, self.program.last + 1) for o in self._known(p)}
        kept |= {s.value for s in program.stores if _plain(s) and s.view.dtype is program.steps[s.value.index].rounded}
        return frozenset(
            o
            for o in kept
            if isinstance(o, Chain) and program.shapes[o.index].columns
            if program.steps[o.index].rounded not in (None, data_type.FLOAT)
        )

    def read_in(self, index: int) -> tuple[int, ...]:
        """The phases that read an input from memory."""
        return tuple(p for p in range(self.program.last + 1) if index in self.reads(p, True))

    # Kernel parameters, in the order of need: the constant cache has those of the first line before the others

    @cached_property
    def _tensors(self) -> tuple[tuple[str, View], ...]:
        """Addresses of the kernel's parameters by their names: rows of phase 0, columns, other inputs, outputs."""
        inputs, stores = self.program.inputs, self.program.stores
        early = [i for i in self.reads(0, True)]
        wide = [i for i, view in enumerate(inputs) if view.columns and not view.rows]
        late = [i for i in range(len(inputs)) if i not in (*early, *wide)]
        scales = [(f"b{k}", store.block_scale) for k, store in enumerate(stores) if store.block_scale]
        return (
            *((f"i{i}", inputs[i]) for i in (*early, *wide, *late)),
            *((f"o{k}", store.view) for k, store in enumerate(stores)),
            *scales,
        )

    def _strided(self, name: str, view: View) -> bool:
        return view.rows and not view.swizzled

    def _parameters(self) -> Iterator[tuple[str, Argument]]:
        """Declarations and what the launch passes."""
        first, rest = self._tensors[:1], self._tensors[1:]
        for name, view in first:
            yield from self._parameter(name, view)
        yield "gf::i64 rows", Constant("int64", math.prod(self.extents))
        for axis, extent in enumerate(self.extents[1:], start=1):
            multiplier, shift = divider(max(extent, 1))
            yield f"gf::u32 extent{axis}", Constant("int32", extent)
            yield f"gf::u32 shift{axis}", Constant("int32", shift)
            yield f"gf::i64 multiplier{axis}", Constant("int64", multiplier)
        for name, view in rest:
            yield from self._parameter(name, view)
        for number, scalar in enumerate(self.program.scalars):
            yield f"{parameter_type(scalar)} scalar{number}", argument(scalar)
        for number, s in enumerate(self.program.sums):
            yield f"void* t{number}", Address(s.view.tensor)
        if self.program.sums:
            yield "void* scratch", Scratch()

    def _parameter(self, name: str, view: View) -> Iterator[tuple[str, Argument]]:
        yield f"{'const ' if name[0] == 'i' else ''}void* {name}", Address(view.tensor)
        if self._strided(name, view):
            for axis, stride in enumerate(view.row_strides):
                yield f"gf::i64 {name}_stride{axis}", Constant("int64", stride * view.dtype.bits // 8)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(value for _, value in self._parameters())

    # The text

    def _lines(self) -> Iterator[str]:
        yield f"constexpr int LAST_PHASE = {self.program.last};"
        yield f"constexpr int AMAXES = {max(len(self._amaxes), 1)};"
        yield "#define KERNEL_PARAMETERS " + ", ".join(declaration for declaration, _ in self._parameters())
        if self.stages:
            yield f"constexpr int STAGES = {self.stages};"
            yield from self.copies.source()
        yield from self._row()
        yield from self._operands()
        yield from self._per_row()
        yield from self._held()
        if self.stages:
            yield from self._sums()
        for phase in range(3):
            yield from self._phase(phase)
        if not self.stages:
            yield from self._raise()

    @cached_property
    def copies(self) -> Copies:
        """What is copied ahead: all that is read of rows, in accesses that are wide enough."""
        inputs = self.program.inputs if self.stages > 1 else ()
        return Copies(tuple(self._copied(i, view) for i, view in enumerate(inputs) if self._can_be_copied(view)))

    def _can_be_copied(self, view: View) -> bool:
        return view.rows and access(view, self.piece if view.columns else 1) >= LEAST

    def _copied(self, i: int, view: View) -> Copied:
        elements = self.piece if view.columns else 1
        address, nbytes = self._address(f"i{i}", view), view.dtype.nbytes(elements)
        return Copied(f"i{i}", view.dtype.facts.ctype, address, nbytes, access(view, elements), view.columns)

    def _row(self) -> Iterator[str]:
        yield ""
        yield "/// The addresses of one row as one of its threads sees it: of the thread's first piece."
        copied = {c.name: self.copies.place(c) for c in self.copies.inputs}
        addresses = {name: copied.get(name) or self._address(name, view) for name, view in self._tensors}
        first = [name for name in addresses if name not in self._later]
        yield "struct Row {"
        yield from (f"  {'const ' if name[0] == 'i' else ''}void* {name};" for name in first)
        yield "  Index thread;"
        yield "  bool exists;  // the last CTA may have fewer rows than threads for them"
        yield from (f"  void* {name} = nullptr;" for name in self._later)
        yield "};"
        yield f"#define ROW_AXES {' '.join(self._axes())}".rstrip()
        yield "#define ROW {" + ", ".join([*(addresses[name] for name in first), "thread", "index < rows"]) + "}"
        yield f"#define ROW_LATER {' '.join(f'row.{name} = {addresses[name]};' for name in self._later)}".rstrip()

    @cached_property
    def _later(self) -> tuple[str, ...]:
        """Outputs whose parameters are not all in the first line."""
        end, behind = 0, set()
        for declaration, _ in self._parameters():
            ctype, _, name = declaration.rpartition(" ")
            size = 4 if ctype in ("gf::u32", "float") else 8
            end = -(-end // size) * size + size
            if end > _FIRST_LINE:
                behind.add(name.partition("_")[0])
        return tuple(name for name, _ in self._tensors if name[0] != "i" and name in behind)

    def _axes(self) -> Iterator[str]:
        """The numbers of a row along several axes."""
        if len(self.extents) == 1:
            return
        rest = "gf::u32(index)"
        for axis in range(len(self.extents) - 1, 0, -1):
            yield f"const gf::u32 above{axis} = gf::divide({rest}, multiplier{axis}, shift{axis});"
            yield f"const gf::u32 axis{axis} = {rest} - above{axis} * extent{axis};"
            rest = f"above{axis}"
        yield f"const gf::u32 axis0 = {rest};"

    def _address(self, name: str, view: View) -> str:
        number = int(name[1:])
        store = None if name[0] == "i" else self.program.stores[number]
        if store is not None and store.amax:
            return name
        at = "index" if len(self.extents) == 1 else "axis{}"
        terms = []
        if view.swizzled:
            blocks = self.columns // store.block_size
            terms = [f"gf::ScalesInTiles::row(index, {blocks})"]
        elif view.rows:
            terms = [f"{at.format(a)} * {name}_stride{a}" for a in range(len(view.row_strides))]
        if name[0] == "b" and not view.swizzled:
            terms.append(f"thread / {store.block_size // self.piece}")
        elif name[0] != "b" and self._wide(name):
            terms.append(f"thread * {view.dtype.nbytes(self.piece)}")
        offset = f"gf::offset({name}, {' + '.join(terms) or '0'})"
        return offset if name[0] == "i" else f"gf::settled({offset})"

    def _wide(self, name: str) -> bool:
        if name[0] == "i":
            return self.program.inputs[int(name[1:])].columns
        return self.program.shapes[self.program.stores[int(name[1:])].value.index].columns

    def _operands(self) -> Iterator[str]:
        scalars = range(len(self.program.scalars))
        yield ""
        yield "/// Operands of one element."
        yield "struct Operands {"
        yield from (f"  float s{k};" for k in scalars)
        yield "};"
        yield f"#define OPERANDS {{{', '.join(f'gf::scalar(scalar{k})' for k in scalars)}}}"

    # Values of which there is one a row

    def _per_row(self) -> Iterator[str]:
        program = self.program
        narrow = [k for k, shape in enumerate(program.shapes) if not shape.columns]
        loads = [i for i, view in enumerate(program.inputs) if not view.columns]
        maxima = self._maxima()
        yield f"constexpr int MAXIMA[] = {{{', '.join(str(len(m)) for m in maxima)}}};"
        yield ""
        yield "/// Values of which there is one a row, known from the phase on that `begin` is numbered by."
        yield "struct PerRow {"
        yield from (f"  float q{i};" for i in loads)
        yield from (f"  float v{k};" for k in narrow)
        for phase in range(3):
            yield f"  GF_DEVICE void begin{phase}(const Row& row, const Operands& s{', float sum' * (phase == 1)}, "
            yield f"                       const float (&maxima)[{max(len(maxima[phase - 1]), 1) if phase else 1}]) {{"
            yield "    (void)row, (void)s, (void)maxima;"
            for i in loads if phase == 0 else ():
                ctype = program.inputs[i].dtype.facts.ctype
                copied = self.copies.named(f"i{i}")
                value = copied.value_read if copied else f"gf::scalar(static_cast<const {ctype}*>(row.i{i}))"
                yield f"    q{i} = row.exists ? {value} : 0.0f;"
            for k in narrow:
                if self._row_phase(k) == phase:
                    yield f"    v{k} = {self._row_expression(k, maxima, phase)};"
            yield "  }"
            yield f"  GF_DEVICE void store{phase}(const Row& row) const {{"
            yield "    (void)row;"
            for number, store in enumerate(program.stores):
                k = store.value.index
                if not program.shapes[k].columns and not store.amax and self._row_phase(k) == phase:
                    ctype, size = store.view.dtype.facts.ctype, store.view.dtype.nbytes(1)
                    yield f"    gf::store_pack<{size}>(row.o{number}, {{{{gf::encode<{ctype}>(v{k})}}}});"
            yield "  }"
        yield "};"

    def _row_phase(self, k: int) -> int:
        return self.program.earliest[k]

    def _maxima(self) -> tuple[tuple[int, ...], ...]:
        """Steps that are the largest magnitude of a row, by the phase that they follow."""
        return tuple(
            tuple(k for k, step in self.program.reduced_after(phase) if step.op_name == AMAX) for phase in range(3)
        )

    def _row_expression(self, k: int, maxima, phase: int) -> str:
        step = self.program.steps[k]
        if step.op_name == INVERSE_RMS:
            epsilon = self._row_operand(dict(step.operands)["epsilon"])
            return self._rounded(step, f"gf::rsqrt(gf::fma(sum, PER_COLUMN, {epsilon}))")
        if step.op_name == ROW_MEAN:
            return self._rounded(step, "sum * PER_COLUMN")
        if step.op_name == AMAX:
            return self._rounded(step, f"maxima[{maxima[phase - 1].index(k)}]")
        return self._rounded(step, expression(step, self._row_operand))

    def _row_operand(self, o: Operand) -> str:
        if isinstance(o, Scalar):
            return f"s.s{self.program.scalars.index(o)}"
        return f"q{o.index}" if isinstance(o, Load) else f"v{o.index}"

    def _rounded(self, step: Step, text: str) -> str:
        return text if step.rounded is None else f"gf::rounded<{step.rounded.facts.ctype}>({text})"

    # Values of which there is one an element

    def _held(self) -> Iterator[str]:
        yield ""
        yield "/// What is kept of a piece between phases."
        yield "struct Held {"
        kept = sorted({o for p in range(1, self.program.last + 1) for o in self._known(p)}, key=str)
        for o in kept:
            packed = self._dtype(o) is not None
            yield f"  {self._bytes_type(o)} {_name(o)};" if packed else f"  float {_name(o)}[PIECE];"
        yield "};"

    def _bytes_type(self, o: Chain | Load) -> str:
        return f"gf::Bytes<{self._dtype(o).nbytes(self.piece)}>"

    def _phase(self, phase: int) -> Iterator[str]:
        exists = phase <= self.program.last
        rows, columns = (self.reads(phase, kind) if exists else () for kind in (True, False))
        yield ""
        yield f"struct Phase{phase} {{"
        yield from self._reads("Rows", rows)
        yield "  GF_DEVICE static Rows any_rows() {"
        yield "    return {" + ", ".join(f"gf::any_bytes<{self._bytes(Load(i)) * self.piece}>()" for i in rows) + "};"
        yield "  }"
        yield from self._read("Rows", "read_rows", rows)
        yield from self._reads("Columns", columns)
        yield from self._read("Columns", "read_columns", columns)
        if exists:
            yield from self._run(phase, rows, columns)
        yield "};"

    def _reads(self, name: str, inputs: Sequence[int]) -> Iterator[str]:
        yield f"  struct {name} {{"
        yield from (f"    {self._bytes_type(Load(i))} r{i};" for i in inputs)
        yield "  };"

    def _read(self, kind: str, name: str, inputs: Sequence[int]) -> Iterator[str]:
        yield f"  GF_DEVICE static {kind} {name}(const Row& row, Index at) {{"
        yield "    (void)row, (void)at;"
        loads = []
        for i in inputs:
            view = self.program.inputs[i]
            size = view.dtype.nbytes(self.piece)
            # Only what nothing writes meanwhile: a row may be overwritten by the output.
            how = "ROW_READS" if view.rows else "COLUMN_READS"
            load = f"gf::load<{size}, {access(view, self.piece)}, {how}>(gf::offset(row.i{i}, at * {size}))"
            copied = self.copies.named(f"i{i}")
            loads.append(copied.piece_read if copied else load)
        yield "    return {" + ",\n            ".join(loads) + "};"
        yield "  }"

    def _run(self, phase: int, rows: Sequence[int], columns: Sequence[int]) -> Iterator[str]:
        program = self.program
        elements, known = self.elements(phase), self._known(phase)
        stores = list(program.stored_in(phase))
        maxima = [k for k, step in program.reduced_after(phase) if step.op_name == AMAX]
        squares = [step for _, step in program.reduced_after(phase) if step.op_name == INVERSE_RMS]
        products = [step for _, step in program.reduced_after(phase) if step.op_name == ROW_MEAN]
        kept = self._known(phase + 1) if phase < program.last else ()
        yield "  GF_DEVICE static void run(const Row& row, Index at, bool inside, const Rows& rows,"
        yield "                            const Columns& columns, Held& held, const Operands& s, const PerRow& p,"
        maximal = f"float (&maxima)[{max(len(maxima), 1)}]"
        squared = ", float (&x)[PIECE]" * bool(squares or products) + ", float (&y)[PIECE]" * bool(products)
        squared += ", Sums& sums" * bool(self.stages and not phase)
        yield f"                            float (&largest)[AMAXES], {maximal}{squared}) {{"
        yield "    (void)row, (void)at, (void)inside, (void)rows, (void)columns, (void)held, (void)s, (void)p;"
        yield "    (void)largest, (void)maxima;"
        arrays = self._arrays(phase)
        for o in elements:
            if o in known:
                yield from self._unpack(o, f"held.{_name(o)}", again=self.unpack_again)
            elif isinstance(o, Load):
                source = f"{'rows' if o.index in rows else 'columns'}.r{o.index}"
                yield from self._unpack(o, source)
                if o in kept:
                    yield f"    held.l{o.index} = {source};"
        for o in arrays:
            if o not in known:
                yield f"    float a{o.index}[PIECE];"
        for loop in self._loops(o for o in elements if isinstance(o, Chain) and o not in known):
            yield "#pragma unroll"
            yield "    for (int i = 0; i < PIECE; ++i) {"
            for o in loop:
                step = program.steps[o.index]
                text = self._expression(step, known, loop)
                yield f"      const float v{o.index} = {text if o in self._packed else self._rounded(step, text)};"
                if o in arrays:
                    yield f"      a{o.index}[i] = v{o.index};"
                if o in kept and o not in self._packed:
                    yield f"      held.v{o.index}[i] = v{o.index};"
            yield "    }"
            if o in self._packed:
                ctype = self._dtype(o).facts.ctype
                yield f"    const {self._bytes_type(o)} p{o.index} = gf::pack<{ctype}>(a{o.index});"
                yield f"    gf::unpack<{ctype}>(p{o.index}, a{o.index});"
                if o in kept:
                    yield f"    held.v{o.index} = p{o.index};"
        for step in squares:
            array = self._array(dict(step.operands)["input"], known)
            yield "#pragma unroll"
            yield "    for (int i = 0; i < PIECE; ++i) {"
            yield f"      x[i] = {array}[i];"
            yield "    }"
        for step in products:
            x, y = (self._array(o, known) for o in reduced(step))
            yield "#pragma unroll"
            yield "    for (int i = 0; i < PIECE; ++i) {"
            yield f"      x[i] = {x}[i], y[i] = {y}[i];"
            yield "    }"
        yield from self._add(phase, known)
        for number, k in enumerate(maxima):
            array = self._array(dict(program.steps[k].operands)["input"], known)
            at = f"maxima[{number}]"
            yield f"    {at} = inside ? gf::max({at}, gf::max_magnitude({array})) : {at};"
        for number, store in stores:
            yield from self._store(number, store, known)
        yield "  }"

    def _unpack(self, o: Chain | Load, source: str, again: bool = False) -> Iterator[str]:
        dtype = self._dtype(o)
        if dtype is not None:
            if again:
                yield f"    gf::forget_unpacked({source});"
            array = self._array(o, ())
            yield f"    float {array}[PIECE];"
            yield f"    gf::unpack<{dtype.facts.ctype}>({source}, {array});"

    def _loops(self, steps: Iterable[Chain]) -> Iterator[list[Chain]]:
        """Steps that are worked out element by element together: up to one that is packed, a piece at a time."""
        loop: list[Chain] = []
        for o in steps:
            loop.append(o)
            if o in self._packed:
                yield loop
                loop = []
        if loop:
            yield loop

    def _arrays(self, phase: int) -> tuple[Chain, ...]:
        """Values that are needed as a whole piece."""
        program = self.program
        wanted = [store.value for _, store in program.stored_in(phase)]
        wanted += [o for _, step in program.reduced_after(phase) for o in reduced(step)]
        wanted += [o for _, s in program.summed_in(phase) for o in s.factors]
        wanted += [o for o in self.elements(phase) if o in self._packed]
        wanted += self._outlasting(phase)
        return tuple(dict.fromkeys(o for o in wanted if isinstance(o, Chain)))

    def _outlasting(self, phase: int) -> Iterator[Chain]:
        """Values that a later loop reads than the one that works them out."""
        known, done = self._known(phase), set()
        for loop in self._loops(o for o in self.elements(phase) if isinstance(o, Chain) and o not in known):
            yield from (o for k in loop for _, o in self.program.steps[k.index].operands if o in done)
            done |= set(loop)

    def _array(self, o: Chain | Load, known: Iterable) -> str:
        """A piece of values, as float32."""
        if isinstance(o, Load):
            return f"l{o.index}"
        return f"held.v{o.index}" if o in known and o not in self._packed else f"a{o.index}"

    def _expression(self, step: Step, known: Iterable, loop: Sequence[Chain]) -> str:
        def operand(o: Operand) -> str:
            if isinstance(o, Scalar):
                return f"s.s{self.program.scalars.index(o)}"
            if not self.program.shape(o).columns:
                return f"p.{'q' if isinstance(o, Load) else 'v'}{o.index}"
            return f"v{o.index}" if o in loop else f"{self._array(o, known)}[i]"

        if step.op_name not in (NORMALIZE, GRADIENT):
            return expression(step, operand)
        given = {port: operand(o) for port, o in step.operands}
        if step.op_name == GRADIENT:
            return f"({given['inverse']} * gf::fma(-{given['normal']}, {given['mean']}, {given['scaled']}))"
        normal = f"({given['input']} * {given['inverse']})"
        if "bias" in given:
            return f"gf::fma({normal}, {given.get('scale', '1.0f')}, {given['bias']})"
        return f"({normal} * {given['scale']})" if "scale" in given else normal

    def _store(self, number: int, store: Store, known: Iterable) -> Iterator[str]:
        ctype, array = store.view.dtype.facts.ctype, self._array(store.value, known)
        if store.amax:
            k = self._amaxes.index(number)
            yield "    if (inside && row.exists) {"
            yield f"      largest[{k}] = gf::max(largest[{k}], gf::max_magnitude({array}));"
            yield "    }"
            return
        width = access(store.view, self.piece)
        if not store.block_size:
            piece = f"gf::pack<{ctype}>({array})"
            if self._dtype(store.value) is store.view.dtype:
                piece = f"held.v{store.value.index}" if store.value in known else f"p{store.value.index}"
            yield f"    gf::store_piece<{width}, ROW_WRITES>(row.o{number}, at, {piece}, inside && row.exists);"
            return
        scales = "gf::ScalesInTiles" if store.block_scale.swizzled else "gf::ScalesInRow"
        yield (
            f"    gf::store_blocks<{ctype}, {store.block_size}, {width}, ROW_WRITES>(row.o{number}, "
            f"{scales}{{row.b{number}}}, row.thread, at, {array}, inside && row.exists);"
        )

    def _add(self, phase: int, known: Iterable) -> Iterator[str]:
        """To the sums over rows."""
        for number, s in self.program.summed_in(phase):
            at = f"sums.of[{number}][i]"
            factors = [f"{self._array(o, known)}[i]" for o in s.factors]
            added = f"gf::fma({', '.join(factors)}, {at})" if len(factors) > 1 else f"{at} + {factors[0]}"
            yield "    if (inside && row.exists) {"
            yield "#pragma unroll"
            yield "      for (int i = 0; i < PIECE; ++i) {"
            yield f"        {at} = {added};"
            yield "      }"
            yield "    }"

    def _sums(self) -> Iterator[str]:
        sums = self.program.sums
        yield ""
        yield f"constexpr int SUMS = {len(sums)};"
        yield "/// What a thread adds up over rows, for one piece."
        yield "struct Sums {"
        yield "  float of[SUMS + (SUMS == 0)][PIECE];"
        yield "};"
        yield "/// Where sums over all rows go. partials: those of each CTA, or cluster."
        yield "struct Totals {"
        yield "  float* partials;"
        yield from (f"  void* t{k};" for k in range(len(sums)))
        yield "};"
        partials = "static_cast<float*>(scratch)" if sums else "nullptr"
        yield "#define TOTALS {" + ", ".join([partials, *(f"t{k}" for k in range(len(sums)))]) + "}"
        yield "template <int SUM>"
        yield "GF_DEVICE void store_total(const Totals& totals, gf::i64 column, float value) {"
        yield "  (void)totals, (void)column, (void)value;"
        for k, s in enumerate(sums):
            ctype, size = s.view.dtype.facts.ctype, s.view.dtype.nbytes(1)
            yield f"  if constexpr (SUM == {k}) {{"
            to = f"gf::offset(totals.t{k}, column * {size})"
            yield f"    gf::store_pack<{size}>({to}, {{{{gf::encode<{ctype}>(value)}}}});"
            yield "  }"
        yield "}"

    def _raise(self) -> Iterator[str]:
        yield ""
        yield "/// What is largest of all, as far as the warp's lanes know; all of them call it together."
        yield "GF_DEVICE void raise_amaxes(const Row& row, const float (&largest)[AMAXES]) {"
        yield "  (void)row, (void)largest;"
        yield from (f"  gf::raise(row.o{number}, largest[{k}]);" for k, number in enumerate(self._amaxes))
        yield "}"

    @cached_property
    def _amaxes(self) -> tuple[int, ...]:
        """The stores that are the largest magnitude of all."""
        return tuple(number for number, store in enumerate(self.program.stores) if store.amax)
