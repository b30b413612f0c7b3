"""A kernel in this process, as ``runtime.launch`` has one on a GPU."""

import ctypes
import functools
import threading

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

    def run(
        self, launch: engine.Launch, buffers: engine.Buffers, scratch: int, stream: int = 0, schedule: int = FORWARD
    ) -> None:
        """Run the kernel to its end; there are no streams.

        scratch: address that the launch's Scratch offsets count from. Raises KernelFaultError
        with what the machine found; an address outside the buffers it does not see (``check`` does).
        """
        if launch.grid == 0:
            return
        packing = Packing(launch.arguments)
        arguments = ctypes.create_string_buffer(max(packing.size, 1))
        packing.into(arguments, buffers, scratch)
        with _turn:
            error = self._run(ctypes.byref(Launch.of(launch, schedule)), arguments)
        if error is not None:
            raise KernelFaultError(f"kernel {self.entry!r} on the emulator: {error.decode()}")


@functools.lru_cache(maxsize=1024)
def load(source: str, entry: str) -> Kernel:
    """The kernel `entry` of a source, compiled on first use. Errors as of ``compiler.build``."""
    return Kernel(str(build(source, entry, Build.LIBRARY)), entry)
