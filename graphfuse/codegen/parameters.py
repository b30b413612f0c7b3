"""Printing of a kernel's parameters, in the order of use: the first line of the constant cache arrives first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphfuse.codegen.expressions import argument, parameter_type
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.contract.engine import Address, Argument, Constant, RowCount, Scratch
from graphfuse.rows.program import Store
from graphfuse.rows.views import View

_FIRST_LINE = 48
"""Bytes of parameters in their first line of the constant cache, on SM90."""


@dataclass(frozen=True)
class Parameter:
    """Parameter of a kernel. argument: the launch's argument for it."""

    ctype: str
    name: str
    argument: Argument

    @property
    def nbytes(self) -> int:
        return 4 if self.ctype in ("gf::u32", "float") else 8


@dataclass(frozen=True)
class Pointer:
    """Parameter with the address of a tensor viewed as rows x columns.

    name: a letter and a number. i: input, o: output, b: block scales of an output, n: row numbers.
    store: the store of an output; None for an input.
    across: as in the plan.
    part: whether its tensor is not the first of several tensors that form an input or output.
    placed: name of the first pointer whose rows are chosen in the same way; empty for that pointer itself.
    shared: name of the first pointer of the same tensor; empty for that pointer itself.
    in_32_bits: as in the plan.
    """

    name: str
    view: View
    store: Store | None = None
    across: bool = False
    part: bool = False
    placed: str = ""
    shared: str = ""
    in_32_bits: bool = False

    @property
    def place_name(self) -> str:
        """Prefix of the names of the place's parameters."""
        return self.placed or self.name

    @property
    def ctype(self) -> str:
        return "void*" if self.store else "const void*"

    @property
    def strides(self) -> tuple[str, ...]:
        """Names of the parameters with the strides of row axes, in bytes."""
        strided = self.view.rows and not self.view.swizzled
        return tuple(f"{self.name}_stride{axis}" for axis in self.axes if strided)

    @property
    def axes(self) -> tuple[int, ...]:
        """The row axes that have one of `strides`: those with a nonzero stride. A single row axis always has one."""
        last, place = len(self.view.row_strides) - 1, self.view.place
        if not (last or place.kind):
            return (0,)
        return tuple(k for k, stride in enumerate(self.view.row_strides) if stride)

    @property
    def of_blocks(self) -> bool:
        """True for block scales, and for values of one per part of a row."""
        scales = self.store is not None and (self.view is self.store.block_scale or self.store.scales_of is not None)
        return scales or self.view.unit.part > 0

    @property
    def stride_parameter(self) -> str | None:
        """Name of the parameter with the stride of columns, of block scales, or of an output's values of one per row,
        in bytes; None if they are contiguous or in tiles."""
        scales = self.of_blocks and not self.view.swizzled and self.view.column_stride != 1
        return f"{self.name}_apart" if scales or self.has_rows_apart or (self.across and self.view.columns) else None

    @property
    def has_rows_apart(self) -> bool:
        """True for an output of one value per row that is not contiguous, if pieces lie across rows."""
        if not self.across or self.store is None or self.store.amax:
            return False
        return self.view.rows and not self.view.columns and self.view.row_strides[-1] != 1

    def scale_stride(self, of: str = "") -> str:
        """Stride of block scales in bytes, in C++. of: prefix of the parameter's name."""
        return f"{of}{self.stride_parameter}" if self.stride_parameter else str(self.view.dtype.nbytes(1))

    @property
    def after(self) -> tuple["Pointer", ...]:
        """Pointers of the tensors that have the following rows."""
        parts = enumerate(self.view.place.following, start=1)
        return tuple(replace(self, name=f"{self.name}_{k}", view=view, part=True) for k, view in parts)

    def parameters(self) -> Iterator[Parameter]:
        if not self.shared:
            yield Parameter(self.ctype, self.name, Address(self.view.tensor))
        for ctype, name, value in () if self.placed else self.view.place.parameters(self.name, self.view.dtype.nbytes):
            yield (
                self._distance(name, value) if ctype == "gf::i64" else Parameter(ctype, name, Constant("int32", value))
            )
        for name, axis in zip(self.strides, self.axes, strict=False):
            stride = self.view.row_strides[axis]
            yield self._distance(name, stride * self.view.dtype.bits // 8)
        if self.stride_parameter:
            apart = self.view.row_strides[-1] if self.has_rows_apart else self.view.column_stride
            yield Parameter("gf::i64", self.stride_parameter, Constant("int64", self.view.dtype.nbytes(apart)))

    def _distance(self, name: str, value: int) -> Parameter:
        """The parameter of a stride or an extent. A 32-bit one needs one multiplication, a 64-bit one three."""
        ctype, passed = ("gf::u32", "int32") if self.in_32_bits and 0 <= value < 2**31 else ("gf::i64", "int64")
        return Parameter(ctype, name, Constant(passed, value))


def pointers(plan: PhasePlan) -> tuple[Pointer, ...]:
    """Pointers, in order: inputs with rows of phase 0, inputs of columns, other inputs, row numbers, outputs."""
    inputs, stores = plan.program.inputs, plan.program.stores
    early = plan.reads(0, True)
    wide = [i for i, view in enumerate(inputs) if view.columns and not view.rows]
    late = [i for i in range(len(inputs)) if i not in (*early, *wide)]
    written = (Pointer(f"o{k}", store.view, store, plan.across) for k, store in enumerate(stores))
    read = (Pointer(f"i{i}", inputs[i], None, plan.across) for i in (*early, *wide, *late))
    found = (
        *(pointer for first in read for pointer in (first, *first.after)),
        *(Pointer(f"n{k}", view) for k, view in enumerate(plan.program.indices)),
        *(pointer for first in written for pointer in (first, *first.after)),
        *(Pointer(f"b{k}", store.block_scale, store) for k, store in enumerate(stores) if store.block_scale),
    )
    return tuple(_alike(found, plan.in_32_bits))


def _alike(found: Sequence[Pointer], in_32_bits: bool) -> Iterator[Pointer]:
    """The pointers with `placed` and `shared` set."""
    names: dict[object, str] = {}
    for p in found:
        view, place = p.view, p.view.place
        placed = names.setdefault((place, view.dtype.bits), p.name) if place.numbers else p.name
        alone = p.store or p.part or place.following
        shared = p.name if alone else names.setdefault(view.tensor, p.name)
        other = {key: name for key, name in (("placed", placed), ("shared", shared)) if name != p.name}
        yield replace(p, in_32_bits=in_32_bits, **other)


def parameters(plan: PhasePlan) -> Iterator[Parameter]:
    first, *rest = pointers(plan)
    yield from first.parameters()
    yield Parameter("gf::i64", "rows", RowCount())
    if groups := plan.program.groups:
        for number, group in enumerate(groups):
            yield Parameter("const void*", f"peers{number}", Address(group.table))
        yield Parameter("gf::u32", "rank", Constant("int32", groups[0].rank))
    for axis, extent in enumerate(plan.extents[1:], start=1):
        multiplier, shift = divider(max(extent, 1))
        yield Parameter("gf::u32", f"less{axis}", Constant("int32", -extent))
        yield Parameter("gf::u32", f"shift{axis}", Constant("int32", shift))
        yield Parameter("gf::i64", f"multiplier{axis}", Constant("int64", multiplier))
    for pointer in rest:
        yield from pointer.parameters()
    for number, scalar in enumerate(plan.program.scalars):
        yield Parameter(parameter_type(scalar), f"scalar{number}", argument(scalar))
    for number, s in enumerate(plan.program.sums):
        yield Parameter("void*", f"t{number}", Address(s.view.tensor))
    if plan.program.sums or plan.scratch:
        yield Parameter("void*", "scratch", Scratch())


def divider(divisor: int) -> tuple[int, int]:
    """Multiplier and shift with which ``gf::divide`` divides numbers below 2^31. With 2^(s-1) < divisor <= 2^s the
    error of the product is less than 2^(31+s) / n."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


def arguments(plan: PhasePlan) -> tuple[Argument, ...]:
    """Arguments of a launch."""
    return tuple(parameter.argument for parameter in parameters(plan))


def source(plan: PhasePlan) -> Iterator[str]:
    """The struct Arguments, with all parameters."""
    yield "struct Arguments {"
    yield from (f"  {p.ctype} {p.name};" for p in parameters(plan))
    yield "};"


def entry(plan: PhasePlan, kernel: str) -> Iterator[str]:
    """The kernel, which passes its arguments to the template's function start. kernel: qualifiers, in C++."""
    found = list(parameters(plan))
    yield ""
    yield "GF_DEVICE void start(const Arguments& a);"
    yield f'extern "C" {kernel} row_program({", ".join(f"{p.ctype} {p.name}" for p in found)}) {{'
    yield f"  start({{{', '.join(p.name for p in found)}}});"
    yield "}"


def later(plan: PhasePlan) -> tuple[Pointer, ...]:
    """Outputs that are added to Row late: some parameters are not in the first line, or their place requires it."""
    end, behind = 0, set()
    for parameter in parameters(plan):
        end = -(-end // parameter.nbytes) * parameter.nbytes + parameter.nbytes
        if end > _FIRST_LINE:
            behind.add(parameter.name)
    outputs = (p for p in pointers(plan) if p.store and not p.part)
    return tuple(p for p in outputs if p.view.place.late or behind & {p.name, *p.strides, p.stride_parameter})
