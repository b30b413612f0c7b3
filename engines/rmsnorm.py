"""A row program around one RMS normalization in one kernel, for any row length.

Serves ``RmsNormFacts`` on NVIDIA GPUs. The kernel is ``rmsnorm.cu``; here are what it
accepts, how a row is spread over threads, and what the launch passes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from graphfuse.codegen.render import render, template
from graphfuse.codegen.rowwise import Rows, access
from graphfuse.device import Device
from graphfuse.dtypes import data_type
from graphfuse.engine import KernelEngine, Launch, No, Problem
from graphfuse.enums import heur_mode
from graphfuse.ir import TensorId
from graphfuse.ops import BLOCKS, OPS
from graphfuse.patterns.rmsnorm import RmsNormFacts
from graphfuse.pointwise import Load
from graphfuse.rowwise import AMAX, INVERSE_RMS, View

_FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
_FP8 = (data_type.FP8_E4M3, data_type.FP8_E5M2)

# Chips that every variant of the kernel is compiled for by the tests.
_COMPILED = (80, 86, 89, 90, 100, 103, 120)
_FP8_INSTRUCTION = 89  # and newer
_FP4_INSTRUCTION = ("sm_100a", "sm_103a", "sm_120a")  # not part of the plain targets
_CLUSTER = 90  # and newer
_LARGEST_CLUSTER = {90: 16, 100: 16, 103: 16}  # CTAs; elsewhere the portable 8

_CHUNK = 8  # elements whose squares are summed one after another; of shorter rows, what divides them
_MAX_THREADS = 1024
_MAX_CTAS = 2**31 - 1
_MAX_DIVIDED = 2**31  # rows of several axes, whose numbers are found by division
_MAX_AXES = 4
_PROPOSED = 3
_SECTOR = 32  # bytes that memory moves at least
# Of a thread and of each of its elements, by the output's bits, in the time that four bytes take.
_INSTRUCTIONS = {4: (10, 0.615), 8: (2.5, 0.515), 32: (1, 0.74)}
_INT_COLUMNS = 2**28  # below this, byte offsets within a row and past its end fit an int
_WARP = 32
# Registers of a thread that may hold what is kept of a row, by threads a CTA. The register file has
# 64 or 128 for each thread, of which the rest of the kernel needs 40 to 50 without spilling;
# smaller CTAs gain nothing by more than 64.
_HELD_REGISTERS = {1024: 16, 512: 40}
_MOST_HELD = 64
_MOST_TOGETHER = 16  # elements that a thread of the largest CTAs has registers to work on at a time
_ROW_REGISTERS = 512 * _HELD_REGISTERS[512]  # the most that a CTA holds


@dataclass(frozen=True)
class RmsNormKnobs:
    """How rows are spread over threads. None of them changes a bit of the result.

    threads_per_row, threads (a CTA): powers of two; rows of more threads than a CTA has are spread over a
    cluster of CTAs. chunks: how many neighbouring chunks of a row, of 8 elements, a thread takes together,
    a power of two. eviction: what the L2 gives up; 0 as usual, 1 rows that were read last of all, 2 rows
    that were read or written first. ahead: 1 to read all before the sum, so that nothing is awaited after it;
    0 if it takes few registers.
    """

    threads_per_row: int
    threads: int
    chunks: int = 1
    eviction: int = 0
    ahead: int = 0

    @property
    def cluster(self) -> int:
        """CTAs that share a row."""
        return max(1, self.threads_per_row // self.threads)


@dataclass(frozen=True)
class _Eviction:
    """How rows are accessed, in C++."""

    reads: str
    writes: str


_EVICTIONS = (
    _Eviction("gf::Access::USUAL", "gf::Access::USUAL"),
    _Eviction("gf::Access::LAST", "gf::Access::USUAL"),
    _Eviction("gf::Access::FIRST", "gf::Access::FIRST"),
)
_AS_USUAL, _READS_LAST, _ALL_FIRST = range(len(_EVICTIONS))
# Bytes moved. Up to the first, rows are often in the L2 when a kernel starts; up to the second they are given up
# first; beyond it those read are given up last.
_CACHED, _SMALL = 512 << 10, 128 << 20


@dataclass(frozen=True)
class _Row:
    """How a row is cut, from facts alone.

    chunk: elements that are summed one after another. chunks: a row's. registers: 32-bit registers that
    a thread needs for one chunk, to read it or to keep of it what later phases need. later: for what the
    phase after the sum reads of one chunk. fits: one CTA can
    keep a row; otherwise a cluster may, or the row is read and worked out again in each phase.
    """

    chunk: int
    chunks: int
    registers: int
    later: int
    fits: bool

    @classmethod
    def of(cls, facts: RmsNormFacts) -> "_Row":
        chunk = math.gcd(facts.columns, _CHUNK)
        chunks = facts.columns // chunk
        rows = Rows(facts.program, facts.row_extents, facts.columns, chunk, resident=True)
        # What is read is worked on at once, when little else takes registers.
        registers = max(1, -(-chunk * max(rows.held_bytes, rows.read_bytes(0, True) // 2) // 4))
        later = -(-chunk * (rows.read_bytes(1, True) + rows.read_bytes(1, False)) // 4)
        return cls(chunk, chunks, registers, later, -(-chunks // 512) * 512 * registers <= _ROW_REGISTERS)

    def resident(self, knobs: RmsNormKnobs) -> bool:
        return self.fits or knobs.cluster > 1

    def passes(self, knobs: RmsNormKnobs) -> int:
        """How often a thread reads what it has registers for, a power of two."""
        if self.resident(knobs):
            return 1
        at_once = max(1, 8 // self.registers)
        return 1 << (-(-self._pieces(knobs) // at_once) - 1).bit_length()

    def steps(self, knobs: RmsNormKnobs) -> int:
        """Pieces of one pass over the row that each thread takes."""
        return -(-self._pieces(knobs) // self.passes(knobs))

    def _pieces(self, knobs: RmsNormKnobs) -> int:
        """Of the row, that each thread takes."""
        return -(-self.chunks // (knobs.threads_per_row * knobs.chunks))


class RmsNormEngine(KernelEngine[RmsNormFacts, RmsNormKnobs]):
    """One generated CUDA kernel; rows never enter its source.

    Numerics: float32 throughout, unless the graph declares roundings; the row's sum of squares is a fixed
    binary tree over chunks of 8 elements, each summed in order. NVFP4
    elements differ from the value before quantization by at most max(scale, amax - 6 * scale),
    scale and amax being those of the block: half the widest gap of E2M1 (4 to 6), or what
    saturation cuts off where rounding made the scale small. Rounding value * (1 / scale)
    may add 2e-6 of that.
    """

    name: ClassVar[str] = "rmsnorm"
    facts: ClassVar[type] = RmsNormFacts
    knobs: ClassVar[type] = RmsNormKnobs
    modes: ClassVar[frozenset[heur_mode]] = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    entry: ClassVar[str] = "rmsnorm"
    dependent_launch: ClassVar[bool] = True

    def why_not(self, facts: RmsNormFacts, device: Device) -> No | None:
        reason = next(_reasons(facts, device), None)
        return None if reason is None else No(reason)

    def propose(self, facts: RmsNormFacts, device: Device, mode: heur_mode) -> Sequence[RmsNormKnobs]:
        row = _Row.of(facts)
        every = [k for k in _every_knob(_eviction(facts)) if next(_faults(facts, row, k, device), None) is None]
        usual = [_in_one_wave(facts, row, k, device) for k in every if _is_usual(k)]
        ranked = sorted(usual, key=lambda knobs: _cost(facts, row, knobs, device))
        if mode is not heur_mode.B:
            return ranked[:_PROPOSED]
        others = [
            replace(k, eviction=e, ahead=a) for k in ranked[:_PROPOSED] for e in range(len(_EVICTIONS)) for a in (0, 1)
        ]
        others = [k for k in others if next(_faults(facts, row, k, device), None) is None]
        return list(dict.fromkeys(ranked + others + every))

    def illegal(self, facts: RmsNormFacts, knobs: RmsNormKnobs, device: Device) -> No | None:
        reason = next(_faults(facts, _Row.of(facts), knobs, device), None)
        return None if reason is None else No(reason)

    def notes(self, facts: RmsNormFacts, knobs: RmsNormKnobs, device: Device) -> tuple[str, ...]:
        return tuple(_notes(facts, knobs, device))

    def in_place(self, facts: RmsNormFacts, knobs: RmsNormKnobs) -> tuple[tuple[TensorId, TensorId], ...]:
        """Each thread writes an element after it last read it, if both lie at one address."""
        rows, program = _rows(facts, knobs), facts.program
        return tuple(
            (x.tensor, store.view.tensor)
            for number, x in enumerate(program.inputs)
            for store in program.stores
            if x.rows and x.columns and not store.block_size and not store.amax
            if (x.dtype, x.row_strides, x.column_stride)
            == (store.view.dtype, store.view.row_strides, store.view.column_stride)
            if program.shapes[store.value.index].columns
            if max(rows.read_in(number), default=0) <= program.phase[store.value.index]
        )

    def source(self, facts: RmsNormFacts, knobs: RmsNormKnobs) -> str:
        return render(template("graphfuse.engines", "rmsnorm.cu"), _prelude(facts, knobs), "rmsnorm.cu")

    def launch(self, facts: RmsNormFacts, knobs: RmsNormKnobs) -> Launch:
        return Launch(
            grid=-(-facts.rows * knobs.threads_per_row // knobs.threads),
            block=knobs.threads,
            arguments=_rows(facts, knobs).arguments,
            cluster=knobs.cluster,
            cleared=tuple(store.view.tensor for store in facts.program.stores if store.amax),
        )

    def problem(self, facts: RmsNormFacts) -> Problem:
        chunk, program = _Row.of(facts).chunk, facts.program

        def described(view: View) -> dict[str, object]:
            varies = "rows" * view.rows + "columns" * view.columns
            return {"type": view.dtype.value, "varies": varies, "access": access(view, chunk)}

        stores = [described(s.view) | {"block": s.block_size, "value": s.value.index} for s in program.stores]
        key = {
            "columns": facts.columns,
            "axes": len(facts.row_extents),
            "inputs": [described(view) for view in program.inputs],
            "steps": [step.op_name for step in program.steps],
            "stores": stores,
        }
        return Problem(key, facts.rows)


def _rows(facts: RmsNormFacts, knobs: RmsNormKnobs) -> Rows:
    row = _Row.of(facts)
    piece = row.chunk * knobs.chunks
    # 16-bit values, unpacked for the sum and kept, take three times their room, which long rows do not have.
    again = row.resident(knobs) and row.steps(knobs) * piece > 40
    return Rows(facts.program, facts.row_extents, facts.columns, piece, row.resident(knobs), again)


def _prelude(facts: RmsNormFacts, knobs: RmsNormKnobs) -> str:
    row = _Row.of(facts)
    piece, steps = row.chunk * knobs.chunks, row.steps(knobs)
    ahead = knobs.threads <= 512 or steps * piece <= 16
    constants = {
        "gf::i64 COLUMNS": facts.columns,
        "int CHUNK": row.chunk,
        "int PIECE": piece,
        "int STEPS": steps,
        "int PASSES": row.passes(knobs),
        "bool AHEAD": _cpp(knobs.ahead == 1),
        "int THREADS_PER_ROW": knobs.threads_per_row,
        "int THREADS": knobs.threads,
        "float PER_COLUMN": "float(1.0 / double(COLUMNS))",
        # Only of what nothing writes meanwhile, as no row is, can reads move ahead of the sum, for which the
        # largest CTAs have no registers left.
        "gf::Access COLUMN_READS": "gf::Access::READ_ONLY" if ahead else "gf::Access::USUAL",
        "gf::Access ROW_READS": _EVICTIONS[knobs.eviction].reads,
        "gf::Access ROW_WRITES": _EVICTIONS[knobs.eviction].writes,
        # The padding of a row is zero when it is read; so are its squares, if nothing is computed before.
        "bool ZEROS_STAY_ZERO": _cpp(isinstance(facts.input, Load)),
    }
    return "".join(
        [
            "namespace problem {\n\n",
            f"using Index = {'int' if facts.columns < _INT_COLUMNS else 'gf::i64'};\n",
            *(f"constexpr {name} = {value};\n" for name, value in constants.items()),
            _rows(facts, knobs).source,
            "\n}  // namespace problem\n",
        ]
    )


def _cpp(value: bool) -> str:
    return str(value).lower()


def _every_knob(eviction: int = _AS_USUAL) -> Iterator[RmsNormKnobs]:
    for chunks in (1, 2, 4):
        for threads_per_row in (1 << k for k in range(15)):
            for threads in (64, 128, 256, 512, 1024):
                yield RmsNormKnobs(threads_per_row, threads, chunks, eviction)


def _eviction(facts: RmsNormFacts) -> int:
    """By the bytes that are moved; a first choice, which tuning may correct."""
    whole = (*facts.program.read_whole, *facts.program.written_whole)
    moved = facts.rows * sum(view.dtype.nbytes(facts.columns) for view in whole)
    if moved <= _CACHED:
        return _AS_USUAL
    return _ALL_FIRST if moved <= _SMALL else _READS_LAST


def _in_one_wave(facts: RmsNormFacts, row: _Row, knobs: RmsNormKnobs, device: Device) -> RmsNormKnobs:
    """The knobs with all read ahead where SMs have no more than a row each: nothing but time is short."""
    ahead = replace(knobs, ahead=1)
    alone = knobs.threads_per_row >= knobs.threads and facts.rows * knobs.cluster <= device.sm_count
    return ahead if alone and next(_faults(facts, row, ahead, device), None) is None else knobs


def _is_usual(knobs: RmsNormKnobs) -> bool:
    """Whether CTAs are of a size that may pay. Of rows of their own as small as can be, for more threads wait for
    each other, but not too small, for each takes time to start; long rows may pay as neighbours."""
    if knobs.cluster > 1:
        return knobs.threads >= 128
    whole = knobs.threads == _MAX_THREADS and knobs.threads_per_row >= 256
    return whole or knobs.threads == max(knobs.threads_per_row, 128)


def _cost(facts: RmsNormFacts, row: _Row, knobs: RmsNormKnobs, device: Device) -> float:
    """Time of a launch in a unit of the model's own, by which knobs are compared.

    What keeps the device busy - memory, instructions or the start of CTAs, one in 0.6 ns, whichever takes longer,
    and what CTAs of a cluster exchange - plus what a launch takes on an idle device: the elements that a
    thread goes through and the reduction. The figures are fitted to exhaustive searches on an H200
    over random sizes and over rows with a residual or many columns (docs/tuning.md).
    """
    program = facts.program
    threads, piece = knobs.threads_per_row, knobs.chunks * row.chunk
    elements = row.steps(knobs) * piece  # of a thread, those past the row's end among them
    if not row.resident(knobs):
        elements = facts.columns / threads * (program.last + 1)
    written = [view.dtype.bits for view in program.written_whole]
    read = [view.dtype.bits for view in program.read_whole]
    more = max(0, len(read) - 1)  # inputs than one
    bits = min(written, default=32)
    start, each = next(figures for most, figures in _INSTRUCTIONS.items() if bits <= most)
    start += 6 * (len(facts.row_extents) - 1)  # to find the row along its axes
    instructions = each * threads * (start + elements) * (1 + 0.11 * max(0.0, math.log2(threads / _WARP)))
    instructions *= 1 + 0.42 * more
    if piece < max((s.block_size for s in program.stores), default=0):  # lanes that share a block work on its scale
        instructions *= 1.1
    moved = facts.columns * (sum(read) * (1 if row.resident(knobs) else program.last + 1) + sum(written)) / 32
    least = min((view.dtype.nbytes(piece) for view in program.read_whole), default=_SECTOR)
    sectors = max(1.0, _SECTOR / (threads * least))  # read for each that is used
    busy = max(moved * sectors, instructions, 640 * threads / knobs.threads) + 4.75 * threads / knobs.threads
    warps = max(1.0, min(threads, knobs.threads) / _WARP)  # that meet for a row
    awaited = 0.32 if knobs.ahead else 1
    alone = 10 + elements * awaited * (1 + 0.45 * more) + 2.4 * math.log2(threads) + 0.11 * warps
    alone += 0.45 * knobs.threads / _WARP
    if knobs.cluster > 1:
        busy += knobs.cluster**2 * (126 + 11.4 * knobs.threads)
        alone += 11 + 1.75 * math.log2(knobs.cluster) + 0.0006 * threads
    return facts.rows / device.sm_count * busy + 1130 * alone


def _held_registers(threads: int) -> int:
    return _HELD_REGISTERS.get(threads, _MOST_HELD)


def _faults(facts: RmsNormFacts, row: _Row, knobs: RmsNormKnobs, device: Device) -> Iterator[str]:
    for name in ("threads_per_row", "threads", "chunks"):
        value = getattr(knobs, name)
        if type(value) is not int or value < 1 or value & (value - 1):
            yield f"{name} is {value!r}; accepted: a power of two"
            return
    if type(knobs.eviction) is not int or knobs.eviction not in range(len(_EVICTIONS)):
        yield f"eviction is {knobs.eviction!r}; accepted: 0 to {len(_EVICTIONS) - 1}"
    if type(knobs.ahead) is not int or knobs.ahead not in (0, 1):
        yield f"ahead is {knobs.ahead!r}; accepted: 0 or 1"
    if not _WARP <= knobs.threads <= _MAX_THREADS:
        yield f"threads is {knobs.threads}; accepted: {_WARP} to {_MAX_THREADS}"
    if knobs.cluster > 1:
        most = _LARGEST_CLUSTER.get(device.sm, 8) if device.sm and device.sm >= _CLUSTER else 1
        if knobs.cluster > most:
            limit = f"clusters of up to {most} CTAs" if most > 1 else f"no clusters: {device} is SM{device.sm}"
            yield f"threads_per_row {knobs.threads_per_row} exceeds threads {knobs.threads}; accepted: {limit}"
    if facts.rows * knobs.threads_per_row > _MAX_CTAS * knobs.threads:
        yield f"{facts.rows} rows, {knobs.threads_per_row} threads each, take more CTAs than a grid can have"
    if row.chunks % knobs.chunks:
        yield f"chunks is {knobs.chunks}; accepted: a divisor of the {row.chunks} chunks of a row"
        return
    if not row.resident(knobs):
        if (knobs.threads_per_row, knobs.chunks) != (_MAX_THREADS, 1):
            yield (
                f"threads_per_row is {knobs.threads_per_row}, chunks {knobs.chunks}; rows of {facts.columns} columns "
                f"are read again in each phase, which takes {_MAX_THREADS} and 1"
            )
        return
    held = row.steps(knobs) * knobs.chunks * row.registers
    if knobs.ahead:
        held += row.steps(knobs) * knobs.chunks * row.later
    if held > _held_registers(knobs.threads):
        yield (
            f"threads_per_row {knobs.threads_per_row} needs {held} registers a thread to hold {facts.columns} "
            f"columns; at {knobs.threads} threads at most {_held_registers(knobs.threads)} may"
        )
    piece = row.chunk * knobs.chunks
    if knobs.threads == _MAX_THREADS and piece > _MOST_TOGETHER:
        yield (
            f"chunks is {knobs.chunks}: of {knobs.threads} threads each has registers for {_MOST_TOGETHER} elements "
            f"at a time, not for {piece}"
        )
    for block in {store.block_size for store in facts.program.stores if store.block_size}:
        if not piece <= block <= knobs.threads_per_row * piece:
            yield (
                f"chunks is {knobs.chunks}, threads_per_row {knobs.threads_per_row}: a thread takes {piece} elements "
                f"together; accepted: up to a block of {block}, which the threads of a row must cover"
            )


def _reasons(facts: RmsNormFacts, device: Device) -> Iterator[str]:
    yield from _device_reasons(device)
    yield from _program_reasons(facts)
    for view in facts.program.inputs:
        yield from _view_reasons(facts, "input", view, _FLOATS, facts.columns if view.columns else 1, 0)
    for number in range(len(facts.program.stores)):
        yield from _store_reasons(facts, number)
    for scalar in facts.program.scalars:
        if scalar.by_value:
            continue
        if scalar.dtype not in _FLOATS:
            yield f"scalar {scalar.name!r} in device memory is {scalar.dtype.name}; accepted: {_names(_FLOATS)}"
        elif scalar.alignment % scalar.dtype.nbytes(1):
            yield (
                f"scalar {scalar.name!r} in device memory is aligned to {scalar.alignment} bytes; "
                f"accepted: a multiple of {scalar.dtype.nbytes(1)}"
            )
    if len(facts.row_extents) > _MAX_AXES:
        yield f"{facts.node}: rows have {len(facts.row_extents)} axes with strides of their own; accepted: {_MAX_AXES}"
    if len(facts.row_extents) > 1 and facts.rows >= _MAX_DIVIDED:
        yield f"{facts.node}: {facts.rows} rows of several axes; accepted: fewer than {_MAX_DIVIDED}"
    row = _Row.of(facts)
    if not any(next(_faults(facts, row, knobs, device), None) is None for knobs in filter(_is_usual, _every_knob())):
        yield f"{facts.rows} rows take more CTAs than a grid can have"


def _device_reasons(device: Device) -> Iterator[str]:
    if not device.runs_kernels:
        yield f"needs a CUDA device or the emulator; got {device}"
    elif device.sm < _COMPILED[0]:
        yield f"needs SM{_COMPILED[0]} or newer; {device} is SM{device.sm}"
    elif device.sm not in _COMPILED:
        yield f"{device} is SM{device.sm}, for which the kernel has not been compiled; accepted: " + ", ".join(
            f"SM{sm}" for sm in _COMPILED
        )


def _program_reasons(facts: RmsNormFacts) -> Iterator[str]:
    program = facts.program
    if not program.shape(facts.input).columns:
        yield f"{facts.node}: the input does not vary over columns"
    for k, step in enumerate(program.steps):
        if step.rounded not in (None, *_FLOATS, *_FP8):
            yield f"a value of {step.op_name} is rounded to {step.rounded.name}; accepted: {_names(_FLOATS + _FP8)}"
        operands = dict(step.operands)
        if step.op_name == INVERSE_RMS and program.shape(operands["epsilon"]).columns:
            yield f"{facts.node}: epsilon is a value of the rows; accepted: one that is the same for all elements"
        if step.op_name == AMAX and not program.shape(operands["input"]).columns:
            yield "the largest magnitude of what is one a row; accepted: of values that vary over columns"
        if step.op_name == INVERSE_RMS and program.earliest[k] != 1:
            yield f"{facts.node}: normalizes what depends on the largest magnitude of a row; accepted: pointwise values"
    if program.last > 2:
        yield f"{facts.node}: {program.last} reductions of a row follow one another; accepted: 2"


def _store_reasons(facts: RmsNormFacts, number: int) -> Iterator[str]:
    store = facts.program.stores[number]
    y, shape = store.view, facts.program.shapes[store.value.index]
    if store.amax:
        if not shape.columns:
            yield f"amax {y.name!r} is of what is one a row; accepted: of values that vary over columns"
        if y.dtype is not data_type.FLOAT:
            yield f"amax {y.name!r} is {y.dtype.name}; accepted: FLOAT"
        if y.alignment % 4:
            yield f"amax {y.name!r} is aligned to {y.alignment} bytes; accepted: a multiple of 4"
        return
    if not shape.columns:
        if not shape.rows and facts.rows != 1:
            yield f"output {y.name!r} is the same for all rows"
        yield from _view_reasons(facts, "output", y, _FLOATS, 1, 1)
        return
    if not shape.rows:
        yield f"output {y.name!r} is the same for all rows"
    if not store.block_size:
        yield from _view_reasons(facts, "output", y, _FLOATS + _FP8, facts.columns, facts.columns)
        return
    made = BLOCKS[store.block_size]
    yield from _view_reasons(facts, "output", y, made.elements, facts.columns, facts.columns)
    if y.dtype.bits < 8 and any(stride % 2 for stride in y.row_strides):
        yield f"output {y.name!r} has row strides {list(y.row_strides)}; accepted: even, as a byte holds two elements"
    if facts.columns % store.block_size:
        yield f"output {y.name!r} has {facts.columns} columns; accepted: a multiple of {store.block_size}"
    if store.block_scale is None:
        yield f"output {y.name!r} is quantized in blocks and has no tensor for their scales"
        return
    blocks = facts.columns // store.block_size
    yield from _view_reasons(facts, "block scale", store.block_scale, (made.scale,), blocks, blocks)


def _view_reasons(
    facts: RmsNormFacts, role: str, view: View, dtypes: Sequence[data_type], columns: int, least: int
) -> Iterator[str]:
    """columns: extent. least: the smallest stride between rows."""
    what = f"{role} {view.name!r}"
    if view.dtype not in dtypes:
        yield f"{what} is {view.dtype.name}; accepted: {_names(dtypes)}"
        return
    if view.swizzled:
        if role != "block scale":
            yield f"{what} is reordered as F8_128x4; accepted for block scales alone"
        return
    if view.column_stride != 1 and columns > 1:
        yield f"{what} has stride {view.column_stride} between columns; accepted: 1"
    if not view.columns and view.alignment % view.dtype.nbytes(1):
        yield f"{what} is aligned to {view.alignment} bytes; accepted: a multiple of {view.dtype.nbytes(1)}"
    # Rows, from the closest ones on, must not reach into each other.
    strides = zip(facts.row_extents, view.row_strides, strict=True)
    for extent, stride in sorted(((e, s) for e, s in strides if e > 1), key=lambda pair: pair[1]):
        if stride < least:
            yield f"{what} has row stride {stride}; accepted: at least {least}"
        least = least and max(least, stride * extent)


def _names(dtypes: Sequence[data_type]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def _notes(facts: RmsNormFacts, knobs: RmsNormKnobs, device: Device) -> Iterator[str]:
    program = facts.program
    rounded = sorted({step.rounded.name for step in program.steps if step.rounded is not None})
    if rounded:
        yield f"float32 throughout; values of tensors declared as {', '.join(rounded)} are rounded to that"
    else:
        yield "float32 throughout: virtual tensors are not rounded to their data types"
    yield "sum of squares: a fixed binary tree, the same bits for every row count, knob and run"
    if any("gf::sigmoid" in OPS[step.op_name].cuda for step in program.steps if step.op_name in OPS):
        yield "sigmoid of x: relative error below 5e-7 + 8e-8 |x|; below x = -87 absolute, below 1.2e-38"
    if not _Row.of(facts).resident(knobs):
        yield f"rows of {facts.columns} columns do not fit in registers: they are read again in each phase"
    instruction, software = "instruction", "software, bit-identical to the instruction"
    if device.kind != "cuda":
        instruction = software
    if any(store.view.dtype in _FP8 or store.block_size for store in program.stores):
        yield f"FP8 conversion: {instruction if device.sm >= _FP8_INSTRUCTION else software}"
    if any(store.view.dtype is data_type.FP4_E2M1 for store in program.stores):
        if device.kind == "cuda" and device.arch in _FP4_INSTRUCTION:
            yield "FP4 conversion: instruction, of value * (1 / scale) rounded to float32"
        else:
            yield (
                "FP4 conversion: software, of value * (1 / scale) rounded to float32 and, unlike for the instruction, "
                "then to a multiple of 2^-22 (2^-21 from 2 on, 2^-20 from 4 on)"
            )
        yield "FP4 error |dequantized - value|: at most (1 + 2e-6) max(scale, amax - 6 * scale) of the block"
