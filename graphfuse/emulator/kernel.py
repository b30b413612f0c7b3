"""Kernels that the emulator runs in this process, with the interface of ``runtime.launch``."""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence

from graphfuse.base.errors import KernelFaultError
from graphfuse.contract import engine
from graphfuse.contract.arguments import Packing
from graphfuse.emulator.compiler import Build, build

FORWARD, REVERSE = 0, 1
"""Schedules: threads in order, or the last first. Any other number is the seed of a random schedule."""


class LaunchRecord(ctypes.Structure):
    """GfLaunch of launch.hpp: the configuration of a launch. gridDimX: named as in the driver's configuration."""

    _fields_ = [
        ("gridDimX", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("ranks", ctypes.c_uint),
        ("calls", ctypes.c_uint),
        ("argument_bytes", ctypes.c_ulonglong),
        ("shared_bytes", ctypes.c_ulonglong),
        ("schedule", ctypes.c_ulonglong),
    ]

    @classmethod
    def of(
        cls, launch: engine.Launch, schedule: int, ranks: int = 1, calls: int = 1, argument_bytes: int = 0
    ) -> "LaunchRecord":
        """The record of a launch. ranks: number that run at the same time. calls: consecutive launches of each rank."""
        how = (launch.grid, launch.block, launch.cluster, launch.cooperative)
        return cls(*how, ranks, calls, argument_bytes, launch.shared_bytes, schedule)


# Held while a kernel runs, as all libraries share one machine.
_turn = threading.Lock()


class EmulatedKernel:
    """A kernel of a loaded library. One thread runs kernels at a time; others wait."""

    def __init__(self, path: str, entry: str):
        self.entry = entry
        self._run = ctypes.CDLL(path).gf_run
        self._run.restype = ctypes.c_char_p

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r} on the emulator)"

    def launcher(self, launch: engine.Launch, dependent: bool = False, schedule: int = FORWARD) -> "EmulatedLauncher":
        """Object that runs the kernel with this launch. `dependent` has no effect, as kernels run one after another."""
        return EmulatedLauncher(self._run, self.entry, launch, schedule)


class EmulatedLauncher:
    """A kernel with its launch. It has the attributes of ``runtime.launch.Launcher`` that generated code of
    ``runtime.fastcall`` uses. Streams have no effect, as a kernel runs to its end."""

    def __init__(self, run: Callable[[object, object], bytes | None], entry: str, launch: engine.Launch, schedule: int):
        self.packing = Packing(launch)
        self.function = None
        self.waiting: dict[int, list] = {}
        self._run = run
        self._entry = entry
        self._launch = launch
        self._schedule = schedule

    def grid(self, rows: int) -> int:
        """Number of CTAs for a number of rows. The launch has ``ByRows``."""
        return self._launch.by_rows.grid(rows)

    def new(self, stream: int) -> tuple:
        """A new launch block, as ``runtime.launch.Block``, with memory of the arguments and a LaunchRecord."""
        memory = ctypes.create_string_buffer(max(self.packing.size, 1))
        config = LaunchRecord.of(self._launch, self._schedule)
        return memory, config, config, memory, self.waiting.setdefault(stream, []), None

    def launch(self, config: LaunchRecord, function: None, memory: object, extra: None) -> int:
        """Run the kernel to its end with a block. Returns 0, the driver's number of success.

        Raises KernelFaultError with a fault that the machine found. Accesses outside of the buffers are not detected
        (``check`` does that)."""
        with _turn:
            error = self._run(ctypes.byref(config), memory)
        if error is not None:
            raise KernelFaultError(f"kernel {self._entry!r} on the emulator: {error.decode()}")
        return 0

    def refused(self, error: int, block: tuple) -> None:
        """Never called: `launch` raises instead of returning an error."""
        raise AssertionError(error)

    def clear(self, stream: int, addresses: Sequence[int]) -> None:
        """Set 4 bytes at each address to zero."""
        for address in addresses:
            ctypes.memset(address, 0, 4)


@functools.lru_cache(maxsize=1024)
def load(source: str, entry: str) -> EmulatedKernel:
    """The kernel `entry` of a source, compiled on first use. Errors as in ``compiler.build``."""
    try:
        return EmulatedKernel(str(build(source, entry, Build.LIBRARY)), entry)
    except OSError:  # another process may have removed the file meanwhile
        return EmulatedKernel(str(build(source, entry, Build.LIBRARY)), entry)
