"""RMSNorm with a pointwise epilogue and quantized output in one kernel, for any row length.

Serves ``RmsNormFacts`` on NVIDIA GPUs. The kernel is ``rmsnorm.cu``; here are what it
accepts, how a row is spread over threads, and what the launch passes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphfuse.codegen import pointwise
from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.dtypes import data_type
from graphfuse.engine import Address, Constant, KernelEngine, Launch, No, Problem
from graphfuse.enums import heur_mode
from graphfuse.ir import TensorId
from graphfuse.ops import BLOCK_FORMATS, OPS
from graphfuse.patterns.rmsnorm import RmsNormFacts, View

_FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
_FP8 = (data_type.FP8_E4M3, data_type.FP8_E5M2)
_BLOCK_FORMATS = {element: (size, scale) for size, (element, scale) in BLOCK_FORMATS.items()}

# Chips that every variant of the kernel is compiled for by the tests.
_COMPILED = (80, 86, 89, 90, 100, 103, 120)
_FP8_INSTRUCTION = 89  # and newer
_FP4_INSTRUCTION = ("sm_100a", "sm_103a", "sm_120a")  # not part of the plain targets

_ACCESS = 16  # bytes of the widest memory access
_MAX_THREADS = 1024
_MAX_CTAS = 2**31 - 1
_PROPOSED = 3
_SECTOR = 32  # bytes that memory moves at least
# Of a thread and of each of its elements, by the output's bits, in the time that four bytes take.
_INSTRUCTIONS = {4: (10, 0.615), 8: (2.5, 0.515), 32: (1, 0.74)}
_INT_COLUMNS = 2**28  # below this, byte offsets within a row and past its end fit an int
_WARP = 32
# Registers of a thread that may hold the row's input, by threads a CTA. The register file has
# 64 or 128 for each thread, of which the rest of the kernel needs 40 to 50 without spilling;
# smaller CTAs gain nothing by more than 64.
_HELD_REGISTERS = {1024: 16, 512: 40}
_MOST_HELD = 64
_ROW_REGISTERS = 512 * _HELD_REGISTERS[512]  # the most that a CTA holds


@dataclass(frozen=True)
class RmsNormKnobs:
    """How rows are spread over threads. None of them changes a bit of the result.

    threads_per_row, threads (a CTA): powers of two. chunks: how many neighbouring 16-byte
    chunks of a row a thread takes together, a power of two.
    """

    threads_per_row: int
    threads: int
    chunks: int = 1


@dataclass(frozen=True)
class _Row:
    """How a row is cut, from facts alone, so that sums are the same for all knobs.

    chunk: elements moved together, at most 16 bytes of input. chunks: a row's.
    registers: 32-bit registers one chunk of input takes. resident: the row's input
    fits the registers of a CTA; otherwise it is read twice.
    """

    chunk: int
    chunks: int
    registers: int
    resident: bool

    @classmethod
    def of(cls, facts: RmsNormFacts) -> "_Row":
        itemsize = facts.input.dtype.nbytes(1)
        chunk = math.gcd(facts.columns, _ACCESS // itemsize)
        chunks = facts.columns // chunk
        registers = max(1, chunk * itemsize // 4)
        held = -(-chunks // 512) * 512 * registers
        return cls(chunk, chunks, registers, held <= _ROW_REGISTERS)

    def steps(self, knobs: RmsNormKnobs) -> int:
        """Pieces of one pass over the row that each thread takes."""
        if self.resident:
            return -(-self.chunks // (knobs.threads_per_row * knobs.chunks))
        return 8 // self.registers


class RmsNormEngine(KernelEngine[RmsNormFacts, RmsNormKnobs]):
    """One generated CUDA kernel; rows never enter its source.

    Numerics: float32 throughout; the row's sum of squares is a fixed binary tree. NVFP4
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
        every = [k for k in _every_knob() if self.illegal(facts, k, device) is None]
        ranked = sorted(filter(_is_usual, every), key=lambda knobs: _cost(facts, knobs, device))
        return ranked[:_PROPOSED] if mode is not heur_mode.B else list(dict.fromkeys(ranked + every))

    def illegal(self, facts: RmsNormFacts, knobs: RmsNormKnobs, device: Device) -> No | None:
        reason = next(_faults(facts, knobs), None)
        return None if reason is None else No(reason)

    def notes(self, facts: RmsNormFacts, knobs: RmsNormKnobs, device: Device) -> tuple[str, ...]:
        return tuple(_notes(facts, device))

    def in_place(self, facts: RmsNormFacts, knobs: RmsNormKnobs) -> tuple[tuple[TensorId, TensorId], ...]:
        # Each thread writes an element after it last read it, if both lie at one address.
        x, y = facts.input, facts.output
        same = (x.dtype, x.rows, x.column_stride) == (y.dtype, y.rows, y.column_stride)
        return ((x.tensor, y.tensor),) if same else ()

    def source(self, facts: RmsNormFacts, knobs: RmsNormKnobs) -> str:
        generated = _prelude(facts, knobs) + pointwise.functor(facts.epilogue).source
        return render(template("graphfuse.engines", "rmsnorm.cu"), generated, "rmsnorm.cu")

    def launch(self, facts: RmsNormFacts, knobs: RmsNormKnobs) -> Launch:
        return Launch(
            grid=-(-facts.rows * knobs.threads_per_row // knobs.threads),
            block=knobs.threads,
            arguments=(
                _address(facts.input),
                Constant("int64", facts.rows),
                Constant("int64", _row_bytes(facts.input)),
                _address(facts.weight),
                _address(facts.output),
                Constant("int64", _row_bytes(facts.output)),
                pointwise.argument(facts.epsilon),
                _address(facts.bias),
                _address(facts.block_scale),
                Constant("int64", _row_bytes(facts.block_scale)),
                _address(facts.inverse_rms),
                Constant("int64", _row_bytes(facts.inverse_rms)),
                *pointwise.functor(facts.epilogue).arguments,
            ),
        )

    def problem(self, facts: RmsNormFacts) -> Problem:
        chunk = _Row.of(facts).chunk
        views = {"input": facts.input, "weight": facts.weight, "bias": facts.bias, "output": facts.output}
        key = {
            name: view and {"type": view.dtype.value, "access": _access(view, chunk)} for name, view in views.items()
        }
        key |= {"columns": facts.columns, "block": facts.block_size, "inverse_rms": facts.inverse_rms is not None}
        return Problem(key | {"steps": [step.op_name for step in facts.epilogue.steps]}, facts.rows)


def _address(view: View | None) -> Address | Constant:
    return Address(view.tensor) if view else Constant("pointer", 0)


def _row_bytes(view: View | None) -> int:
    """Bytes from one row to the next."""
    return view.row_stride * view.dtype.bits // 8 if view else 0


def _access(view: View | None, elements: int) -> int:
    """Bytes of the widest access that every chunk of `elements` of the tensor is aligned for."""
    if view is None:
        return 1
    return math.gcd(_ACCESS, view.dtype.nbytes(elements), view.alignment, _row_bytes(view))


def _prelude(facts: RmsNormFacts, knobs: RmsNormKnobs) -> str:
    row = _Row.of(facts)
    piece = row.chunk * knobs.chunks
    types = {
        "Input": facts.input.dtype.facts.ctype,
        "Weight": facts.weight.dtype.facts.ctype,
        "Bias": (facts.bias or facts.weight).dtype.facts.ctype,
        "Output": facts.output.dtype.facts.ctype,
        "Index": "int" if facts.columns < _INT_COLUMNS else "gf::i64",
        "Epsilon": pointwise.parameter_type(facts.epsilon),
    }
    constants = {
        "gf::i64 COLUMNS": facts.columns,
        "int CHUNK": row.chunk,
        "int PIECE": piece,
        "int STEPS": row.steps(knobs),
        "int THREADS_PER_ROW": knobs.threads_per_row,
        "int THREADS": knobs.threads,
        "int INPUT_ACCESS": _access(facts.input, piece),
        "int WEIGHT_ACCESS": _access(facts.weight, piece),
        "int BIAS_ACCESS": _access(facts.bias, piece),
        "int OUTPUT_ACCESS": _access(facts.output, piece),
        "int BLOCK": facts.block_size,
        "bool HAS_BIAS": str(facts.bias is not None).lower(),
        "bool HAS_INVERSE_RMS": str(facts.inverse_rms is not None).lower(),
    }
    return "".join(
        [
            "namespace problem {\n",
            *(f"using {name} = {ctype};\n" for name, ctype in types.items()),
            *(f"constexpr {name} = {value};\n" for name, value in constants.items()),
            "}  // namespace problem\n",
        ]
    )


def _every_knob() -> Iterator[RmsNormKnobs]:
    for chunks in (1, 2, 4):
        for threads_per_row in (1 << k for k in range(11)):
            for threads in (64, 128, 256, 512, 1024):
                yield RmsNormKnobs(threads_per_row, threads, chunks)


def _is_usual(knobs: RmsNormKnobs) -> bool:
    """Whether CTAs are as small as pays: more threads wait for each other, fewer take more CTAs to start."""
    return knobs.threads == max(knobs.threads_per_row, 128)


def _cost(facts: RmsNormFacts, knobs: RmsNormKnobs, device: Device) -> float:
    """Time of a launch in a unit of the model's own, by which knobs are compared.

    What keeps an SM busy - memory or instructions, whichever takes longer - plus what a launch
    takes on an idle device: the elements that a thread goes through and the reduction. The
    figures are fitted to exhaustive searches on an H200 over random sizes (docs/tuning.md).
    """
    row = _Row.of(facts)
    threads, piece = knobs.threads_per_row, knobs.chunks * row.chunk
    elements = row.steps(knobs) * piece  # of a thread, those past the row's end among them
    start, each = next(figures for bits, figures in _INSTRUCTIONS.items() if facts.output.dtype.bits <= bits)
    instructions = each * threads * (start + elements) * (1 + 0.11 * max(0.0, math.log2(threads / _WARP)))
    if piece < facts.block_size:  # lanes that share a block each work its scale out
        instructions *= 1.1
    moved = facts.columns * (facts.input.dtype.bits + facts.output.dtype.bits) / 32
    sectors = max(1.0, _SECTOR / (threads * facts.input.dtype.nbytes(piece)))  # read for each that is used
    alone = 10 + elements + 2.4 * math.log2(threads) + 0.56 * max(1.0, threads / _WARP)
    return facts.rows / device.sm_count * max(moved * sectors, instructions) + 1130 * alone


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def _held_registers(threads: int) -> int:
    return _HELD_REGISTERS.get(threads, _MOST_HELD)


def _faults(facts: RmsNormFacts, knobs: RmsNormKnobs) -> Iterator[str]:
    row = _Row.of(facts)
    for name in ("threads_per_row", "threads", "chunks"):
        value = getattr(knobs, name)
        if type(value) is not int or value < 1 or value & (value - 1):
            yield f"{name} is {value!r}; accepted: a power of two"
            return
    if not _WARP <= knobs.threads <= _MAX_THREADS:
        yield f"threads is {knobs.threads}; accepted: {_WARP} to {_MAX_THREADS}"
    if knobs.threads_per_row > knobs.threads:
        yield f"threads_per_row {knobs.threads_per_row} exceeds threads {knobs.threads}"
    if facts.rows * knobs.threads_per_row > _MAX_CTAS * knobs.threads:
        yield f"{facts.rows} rows, {knobs.threads // knobs.threads_per_row} a CTA, take more CTAs than a grid can have"
    if row.chunks % knobs.chunks:
        yield f"chunks is {knobs.chunks}; accepted: a divisor of the {row.chunks} chunks of a row"
        return
    if not row.resident:
        if (knobs.threads_per_row, knobs.chunks) != (_MAX_THREADS, 1):
            yield (
                f"threads_per_row is {knobs.threads_per_row}, chunks {knobs.chunks}; rows of {facts.columns} columns "
                f"are read twice, which takes {_MAX_THREADS} and 1"
            )
        return
    held = row.steps(knobs) * knobs.chunks * row.registers
    if held > _held_registers(knobs.threads):
        yield (
            f"threads_per_row {knobs.threads_per_row} needs {held} registers a thread to hold {facts.columns} "
            f"columns; at {knobs.threads} threads at most {_held_registers(knobs.threads)} may"
        )
    piece = row.chunk * knobs.chunks
    if facts.block_size and not piece <= facts.block_size <= knobs.threads_per_row * piece:
        yield (
            f"chunks is {knobs.chunks}, threads_per_row {knobs.threads_per_row}: a thread takes {piece} elements "
            f"together; accepted: up to a block of {facts.block_size}, which the threads of a row must cover"
        )


def _reasons(facts: RmsNormFacts, device: Device) -> Iterator[str]:
    yield from _device_reasons(device)
    x, y = facts.input, facts.output
    accepted = {
        "input": (x, _FLOATS),
        "weight": (facts.weight, _FLOATS),
        "bias": (facts.bias, _FLOATS),
        "output": (y, _FLOATS + _FP8 + tuple(_BLOCK_FORMATS)),
        "inverse RMS": (facts.inverse_rms, (data_type.FLOAT,)),
        "block scale": (facts.block_scale, tuple(scale for _, scale in _BLOCK_FORMATS.values())),
    }
    views = {role: (view, dtypes) for role, (view, dtypes) in accepted.items() if view is not None}
    for role, (view, dtypes) in views.items():
        if view.dtype not in dtypes:
            yield f"{role} {view.name!r} is {view.dtype.name}; accepted: {_names(dtypes)}"
    for scalar in (facts.epsilon, *facts.epilogue.scalars):
        if scalar.by_value:
            continue
        if scalar.dtype not in _FLOATS:
            yield f"scalar {scalar.name!r} in device memory is {scalar.dtype.name}; accepted: {_names(_FLOATS)}"
        elif scalar.alignment % scalar.dtype.nbytes(1):
            yield (
                f"scalar {scalar.name!r} in device memory is aligned to {scalar.alignment} bytes; "
                f"accepted: a multiple of {scalar.dtype.nbytes(1)}"
            )
    yield from _block_reasons(facts)
    for role, (view, _) in views.items():
        yield from _stride_reasons(facts, role, view)
    if not any(_is_usual(knobs) and next(_faults(facts, knobs), None) is None for knobs in _every_knob()):
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


def _block_reasons(facts: RmsNormFacts) -> Iterator[str]:
    y = facts.output
    size, _ = _BLOCK_FORMATS.get(y.dtype, (0, None))
    if facts.block_size != size:
        yield f"output {y.name!r} is {y.dtype.name} in blocks of {facts.block_size}; accepted: blocks of {size}"
    if size == 0:
        return
    if facts.block_scale is None:
        yield f"output {y.name!r} is {y.dtype.name} and has no tensor for its block scales"
    if facts.columns % size:
        yield f"output {y.name!r} has {facts.columns} columns; accepted: a multiple of {size}"
    if facts.rows > 1 and y.row_stride % 2:
        yield f"output {y.name!r} has row stride {y.row_stride}; accepted: even, as a byte holds two elements"


def _stride_reasons(facts: RmsNormFacts, role: str, view: View) -> Iterator[str]:
    columns = {
        "inverse RMS": 1,
        "block scale": facts.columns // facts.block_size if facts.block_size else 1,
    }.get(role, facts.columns)
    if view.column_stride != 1 and columns > 1:
        yield f"{role} {view.name!r} has stride {view.column_stride} between columns; accepted: 1"
    if role in ("weight", "bias"):
        if any(extent > 1 for extent, _ in view.rows):
            yield f"{role} {view.name!r} varies over rows {_axes(view)}; accepted: one row"
        return
    if len(view.rows) > 1:
        yield f"{role} {view.name!r} has rows with several strides {_axes(view)}; accepted: one"
        return
    least = 0 if role == "input" else columns
    if facts.rows > 1 and view.row_stride < least:
        yield f"{role} {view.name!r} has row stride {view.row_stride}; accepted: at least {least}"
    if role == "inverse RMS" and view.alignment % 4:
        yield f"{role} {view.name!r} is aligned to {view.alignment} bytes; accepted: a multiple of 4"


def _axes(view: View) -> str:
    return "(extent, stride) " + ", ".join(f"({extent}, {stride})" for extent, stride in view.rows)


def _names(dtypes: Sequence[data_type]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def _notes(facts: RmsNormFacts, device: Device) -> Iterator[str]:
    yield "float32 throughout: virtual tensors are not rounded to their data types"
    yield "sum of squares: a fixed binary tree, the same bits for every row count, knob and run"
    if any("gf::sigmoid" in OPS[step.op_name].cuda for step in facts.epilogue.steps):
        yield "sigmoid of x: relative error below 5e-7 + 8e-8 |x|; below x = -87 absolute, below 1.2e-38"
    if not _Row.of(facts).resident:
        yield f"rows of {facts.columns} columns do not fit in registers: the input is read twice"
    instruction, software = "instruction", "software, bit-identical to the instruction"
    if device.kind != "cuda":
        instruction = software
    if facts.output.dtype in _FP8 or facts.block_size:
        yield f"FP8 conversion: {instruction if device.sm >= _FP8_INSTRUCTION else software}"
    if facts.block_size:
        if device.kind == "cuda" and device.arch in _FP4_INSTRUCTION:
            yield "FP4 conversion: instruction, of value * (1 / scale) rounded to float32"
        else:
            yield (
                "FP4 conversion: software, of value * (1 / scale) rounded to float32 and, unlike for the instruction, "
                "then to a multiple of 2^-22 (2^-21 from 2 on, 2^-20 from 4 on)"
            )
        yield "FP4 error |dequantized - value|: at most (1 + 2e-6) max(scale, amax - 6 * scale) of the block"
