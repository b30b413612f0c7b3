"""A kernel in this process, as ``runtime.launch`` has one on a GPU."""

import ctypes
import functools
import threading
from collections.abc import Callable

from graphfuse import engine
from graphfuse.arguments import Packing
from graphfuse.emulator.compiler import Build, build
from graphfuse.errors import KernelFaultError

FORWARD, REVERSE = 0, 1
"""Schedules: threads in order, or the last first. Any other number is the seed of a random one."""


class Launch(ctypes.Structure):
    """GfLaunch of launch.hpp."""

    _fields_ = [
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("shared_bytes", ctypes.c_ulonglong),
        ("schedule", ctypes.c_ulonglong),
    ]

    @classmethod
    def of(cls, launch: engine.Launch, schedule: int) -> "Launch":
        return cls(launch.grid, launch.block, launch.cluster, launch.cooperative, launch.shared_bytes, schedule)


# Libraries share one machine.
_turn = threading.Lock()


class Kernel:
    """A kernel of a loaded library. One thread runs kernels at a time; others wait."""

    def __init__(self, path: str, entry: str):
        self.entry = entry
        self._run = ctypes.CDLL(path).gf_run
        self._run.restype = ctypes.c_char_p

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r} on the emulator)"

    def launcher(self, launch: engine.Launch) -> "Launcher":
        """What runs the kernel as `launch` says."""
        return Launcher(self._run, self.entry, launch)

    def run(
        self, launch: engine.Launch, buffers: engine.Buffers, scratch: int, stream: int = 0, schedule: int = FORWARD
    ) -> None:
        """Run the kernel once, to its end; arguments and errors as of ``Launcher.freeze``."""
        self.launcher(launch).freeze(buffers, scratch, stream, schedule=schedule)()


class Launcher:
    """A kernel with how it is started; only buffers are open."""

    def __init__(self, run: Callable[[object, object], bytes | None], entry: str, launch: engine.Launch):
        self._run = run
        self._entry = entry
        self._launch = launch
        self._packing = Packing(launch.arguments)

    def freeze(
        self,
        buffers: engine.Buffers,
        scratch: int,
        stream: int = 0,
        dependent: bool = False,
        schedule: int = FORWARD,
    ) -> Callable[[], None]:
        """A launch with everything packed; calling it runs the kernel to its end.

        scratch: address that the launch's Scratch offsets count from. There are no streams, and no kernel
        begins before another ends, whatever `dependent` allows. The call raises KernelFaultError with what
        the machine found; an address outside the buffers it does not see (``check`` does).
        """
        cleared = [buffers.address(tensor) for tensor in self._launch.cleared]
        if self._launch.grid == 0:
            return functools.partial(_clear, cleared)
        packed = ctypes.create_string_buffer(max(self._packing.size, 1))
        self._packing.into(packed, buffers, scratch)
        launch = Launch.of(self._launch, schedule)
        return functools.partial(_start, self._run, self._entry, launch, packed, cleared)


def _start(
    run: Callable[[object, object], bytes | None], entry: str, launch: Launch, packed: object, cleared: list[int]
) -> None:
    with _turn:
        _clear(cleared)
        error = run(ctypes.byref(launch), packed)
    if error is not None:
        raise KernelFaultError(f"kernel {entry!r} on the emulator: {error.decode()}")


def _clear(addresses: list[int]) -> None:
    for address in addresses:
        ctypes.memset(address, 0, 4)


@functools.lru_cache(maxsize=1024)
def load(source: str, entry: str) -> Kernel:
    """The kernel `entry` of a source, compiled on first use. Errors as of ``compiler.build``."""
    try:
        return Kernel(str(build(source, entry, Build.LIBRARY)), entry)
    except OSError:  # another process may have removed it meanwhile
        return Kernel(str(build(source, entry, Build.LIBRARY)), entry)
