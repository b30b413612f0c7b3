"""Runs a kernel under sanitizers, in a separate program. It is meant for tests of engines, also of other packages."""

import functools
import io
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphfuse.base.device import EMULATOR
from graphfuse.base.errors import KernelFaultError
from graphfuse.contract import engine, launch_limits, signature
from graphfuse.contract.arguments import Packing
from graphfuse.emulator.compiler import Build, build, runner
from graphfuse.emulator.kernel import FORWARD, REVERSE, LaunchRecord
from graphfuse.op_graph.ir import TensorId

SCHEDULES = (FORWARD, REVERSE, 20)
Name = Hashable
"""Key that identifies a piece of memory."""
_SECONDS = 300
_REPORT = 6000  # characters of a sanitizer's report that an error has at most


@dataclass(frozen=True)
class Memory:
    """A tensor's memory before the kernel runs.

    address: its last 8 bits are kept, for the alignment. Tensors share the memory where their addresses overlap.
    content: all bytes from the tensor's first to its last.
    """

    address: int
    content: bytes


def check(
    source: str,
    entry: str,
    launch: engine.Launch,
    memory: Mapping[TensorId, Memory],
    scalars: Mapping[TensorId, float] | None = None,
    sanitizers: Build = Build.ADDRESS,
    schedules: Sequence[int] = SCHEDULES,
) -> list[dict[TensorId, bytes]]:
    """Bytes of each tensor's memory after the kernel has run, for each schedule.

    Every schedule starts with the given contents; memory that the launch clears is zero. Memory outside of the tensors
    and of the launch's scratch memory (at first bytes of NaN) is out of bounds. Raises KernelFaultError with the report
    of the machine or the sanitizers, or with a violated limit of launches (``launch_limits``), and the errors of
    ``compiler.build``.
    """
    one = [{tensor: tensor for tensor in memory}]
    memory = {t: replace(m, content=bytes(len(m.content))) if t in launch.cleared else m for t, m in memory.items()}
    return check_ranks(source, entry, [launch], memory, [one], {}, scalars, sanitizers, schedules)


def check_ranks(
    source: str,
    entry: str,
    launches: Sequence[engine.Launch],
    memory: Mapping[Name, Memory],
    calls: Sequence[Sequence[Mapping[TensorId, Name]]],
    tables: Mapping[Name, Sequence[Name]],
    scalars: Mapping[TensorId, float] | None = None,
    sanitizers: Build = Build.ADDRESS,
    schedules: Sequence[int] = SCHEDULES,
) -> list[dict[Name, bytes]]:
    """Bytes of all memory after kernels have run on several ranks at the same time, for each schedule.

    launches: one for each rank; they differ only in constants. calls: for each rank its consecutive calls, the same
    number for all, each with the memory of its tensors. tables: memory that holds addresses, with the names of the
    memory that these point to. Other arguments and errors are as in `check`. No memory is cleared.
    """
    (launch, *_), ranks = launches, len(launches)
    for each in launches:
        wrong = launch_limits.fault(each, EMULATOR) or signature.fault(source, entry, each)
        if wrong:
            raise KernelFaultError(f"kernel {entry!r}: the launch's {wrong}")
    library = build(source, entry, sanitizers)
    allocations = _allocations(memory, launch.scratch_bytes)
    packing = Packing(launch)
    arguments, relocations = b"", []
    for each, of_rank in zip(launches, calls, strict=True):
        for tensors in of_rank:
            for argument, offset in zip(each.arguments, packing.offsets, strict=True):
                at = (len(allocations), len(arguments) + offset)
                if isinstance(argument, engine.Address):
                    relocations.append((*at, *_place(allocations, memory[tensors[argument.tensor]])))
                if isinstance(argument, engine.Scratch):
                    relocations.append((*at, len(allocations) - 1, argument.offset))
            arguments += packing.layout.pack(*(_value(a, each, scalars or {}) for a in each.arguments))
    for table, names in tables.items():
        index, offset = _place(allocations, memory[table])
        for number, name in enumerate(names):
            relocations.append((index, offset + 8 * number, *_place(allocations, memory[name])))
    record = LaunchRecord.of(launch, 0, ranks, len(calls[0]), packing.layout.size)
    problem = b"".join(
        [
            bytes(record),
            struct.pack("@4Q", len(schedules), len(allocations), len(relocations), len(arguments)),
            struct.pack(f"@{len(schedules)}Q", *schedules),
            *(struct.pack("@2Q", len(a.content), a.address % 256) for a in allocations),
            *(struct.pack("@4Q", *r) for r in relocations),
            arguments,
            *(a.content for a in allocations),
        ]
    )
    made = io.BytesIO(_run(library, problem, entry, sanitizers))
    places = {name: (*_place(allocations, m), len(m.content)) for name, m in memory.items()}
    results = []
    for _ in schedules:
        after = [made.read(len(a.content)) for a in allocations]
        results.append({name: after[index][at : at + length] for name, (index, at, length) in places.items()})
    return results


def _allocations(memory: Mapping[Name, Memory], scratch_bytes: int) -> list[Memory]:
    """Memory in the order of addresses, overlapping pieces joined; then the scratch memory."""
    joined: list[Memory] = []
    for m in sorted(memory.values(), key=lambda m: m.address):
        last = joined[-1] if joined else None
        if last is not None and m.address < last.address + len(last.content):
            kept = m.address - last.address
            joined[-1] = Memory(last.address, last.content[:kept] + m.content + last.content[kept + len(m.content) :])
        else:
            joined.append(m)
    return [*joined, Memory(0, b"\xff" * scratch_bytes)]


def _place(allocations: Sequence[Memory], m: Memory) -> tuple[int, int]:
    """(index of the allocation that contains the memory, byte offset in it)."""
    for index, a in enumerate(allocations[:-1]):
        if a.address <= m.address and m.address + len(m.content) <= a.address + len(a.content):
            return index, m.address - a.address
    raise AssertionError("every piece of memory is part of an allocation")


def _value(argument: engine.Argument, launch: engine.Launch, scalars: Mapping[TensorId, float]) -> float:
    """The number of an argument; 0 for an address, which is known only in the program that runs the kernel."""
    match argument:
        case engine.HostScalar(tensor):
            return scalars[tensor]
        case engine.Constant(_, value):
            return value
        case engine.RowCount():
            return launch.by_rows.rows if launch.by_rows else 0
    return 0


def _run(library: Path, problem: bytes, entry: str, sanitizers: Build) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "problem"), Path(folder, "results")
        given.write_bytes(problem)
        prefix = _fixed_addresses() if sanitizers is Build.RACE else ()
        command = [*prefix, *map(str, (runner(sanitizers), library, given, made))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise KernelFaultError(f"kernel {entry!r} did not end within {_SECONDS} s") from None
        if done.returncode:
            report = (done.stderr or f"the program ended with {done.returncode}").strip()
            raise KernelFaultError(f"kernel {entry!r} under {sanitizers.name}:\n{report[:_REPORT]}")
        return made.read_bytes()


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """Command that turns off randomization of addresses, with which ThreadSanitizer cannot start on some systems."""
    command = (shutil.which("setarch") or "setarch", "--addr-no-randomize")
    try:
        works = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except OSError:
        works = False
    return command if works else ()
