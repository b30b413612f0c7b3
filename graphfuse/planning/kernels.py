"""Compiles, loads and prepares the kernels of a plan's parts, on a GPU or the emulator."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from graphfuse.base.device import EMULATOR, Device
from graphfuse.base.errors import DeviceError
from graphfuse.contract.engine import Kernel, Launch, Prepared
from graphfuse.planning import guard
from graphfuse.planning.kernel_cache import CodeOf
from graphfuse.planning.plan import Part
from graphfuse.planning.recipe import Code


def compilers(device: Device) -> ThreadPoolExecutor:
    """Threads in which kernels for a device can be compiled and loaded at the same time."""
    if device.kind == "cuda":
        from graphfuse.runtime import cuda_core  # noqa: F401 - two threads that import it first at once would fail
    return ThreadPoolExecutor(os.cpu_count())


def compiled(source: str, entry: str, name: str, device: Device) -> Code:
    """A kernel from the cache of the process or the disk, else compiled. On the emulator it is compiled when loaded."""
    if device.kind == EMULATOR.kind:
        return Code.of(source, entry, name, b"")
    from graphfuse.runtime import cache

    return Code.of(source, entry, name, cache.cubin(source, device.arch, name))


def loaded(code: Code, source: str, device: Device) -> Kernel:
    """A kernel that can be run, on a GPU from its machine code, on the emulator from its source.

    For a device that is not on this machine, a placeholder that cannot be run."""
    if not device.here:
        return _Unloaded()
    if device.kind == EMULATOR.kind:
        from graphfuse.emulator import kernel as emulated

        return emulated.load(source, code.entry)
    from graphfuse.runtime import launch

    return launch.load(code.cubin, code.entry, device)


class _Unloaded:
    """Placeholder of a kernel that is compiled for a device that is not on this machine."""

    def launcher(self, launch: Launch, dependent: bool = False) -> NoReturn:
        raise DeviceError("a kernel that was compiled ahead is not started where it was compiled")


def prepare(part: Part, device: Device, code_of: CodeOf = compiled) -> Prepared:
    """The part's work, ready to run.

    Raises PluginError if a third-party engine fails, and the errors of ``Engine.prepare`` and `code_of`."""

    def kernel(source: str, entry: str) -> Kernel:
        return loaded(code_of(source, entry, f"{part.engine.name}.cu", device), source, device)

    return guard.prepared(part, device, kernel)
