"""`Device`, a record of the device that an engine plans for. No CUDA calls are made here.

``graphfuse.runtime.device`` fills in a record from the driver. ``for_arch`` and ``for_sm`` return the published figures
of an architecture, so that plans and kernels can be made without the chip.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from graphfuse.base.errors import DeviceError, SettingError


@dataclass(frozen=True)
class Device:
    """One processor that plans are made for.

    kind: "cuda", "cpu", or "emulator", which runs kernels as a GPU does but on CPU memory.
    ordinal: CUDA device number (0 for others).
    compute_capability: (major, minor); (0, 0) for the CPU. Sizes are in bytes: l2_bytes, shared_memory_per_block
        (opt-in limit), shared_memory_per_sm, memory_bytes (0 if unknown).
    here: False for a chip that this machine lacks. Kernels are compiled for it, but not loaded.
    """

    kind: str
    ordinal: int = 0
    name: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    sm_count: int = 0
    threads_per_sm: int = 0
    registers_per_sm: int = 0
    shared_memory_per_block: int = 0
    shared_memory_per_sm: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    here: bool = True

    @property
    def sm(self) -> int:
        """Compute capability as one number: (9, 0) is 90, (12, 0) is 120."""
        major, minor = self.compute_capability
        return major * 10 + minor

    @property
    def arch(self) -> str:
        """Architecture name for NVRTC, with the suffix that enables the chip's own instructions."""
        return f"sm_{self.sm}{ARCH_SUFFIX.get(self.sm, '')}"

    @property
    def runs_kernels(self) -> bool:
        """True if the device runs kernels that include ``codegen.headers``; other CUDA C++ needs kind "cuda"."""
        return self.kind in ("cuda", "emulator")

    @property
    def memory(self) -> str:
        """Torch's name of the device whose memory is used: "cpu" or "cuda:N"."""
        return str(self) if self.kind == "cuda" else "cpu"

    @property
    def described(self) -> str:
        """Name of the device in error messages."""
        return f"{self} ({self.name})" if self.here else f"{self.arch} ({self.name}), which is not here"

    def check_here(self, graph: str) -> None:
        """Raises DeviceError if this machine lacks the device. graph: name of a graph planned for it."""
        if not self.here:
            raise DeviceError(
                f"graph {graph!r} is planned for {self.described}; serialize() keeps its plans, and "
                "deserialize(handle, data) runs them where there is one"
            )

    def __str__(self) -> str:
        return f"cuda:{self.ordinal}" if self.kind == "cuda" else self.kind


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # the system does not report it
        return 0


CPU = Device("cpu", name="CPU", memory_bytes=_host_memory())

# Chips whose architecture-specific ("a") instructions the kernels use; others get no suffix.
ARCH_SUFFIX = {90: "a", 100: "a", 103: "a", 120: "a"}


def _chip(name: str, *figures: Any) -> Device:
    return dataclasses.replace(Device("cuda", 0, name, *figures), here=False)


# Published figures (CUDA C++ programming guide, table of compute capabilities; SMs, L2
# and memory of the largest data-centre or workstation part).
_ARCHES = {
    "sm_80": _chip("A100", (8, 0), 108, 2048, 65536, 163 << 10, 164 << 10, 40 << 20, 80 << 30),
    "sm_86": _chip("A40", (8, 6), 84, 1536, 65536, 99 << 10, 100 << 10, 6 << 20, 48 << 30),
    "sm_89": _chip("L40S", (8, 9), 142, 1536, 65536, 99 << 10, 100 << 10, 96 << 20, 48 << 30),
    "sm_90a": _chip("H200", (9, 0), 132, 2048, 65536, 227 << 10, 228 << 10, 60 << 20, 141 << 30),
    "sm_100a": _chip("B200", (10, 0), 148, 2048, 65536, 227 << 10, 228 << 10, 126 << 20, 192 << 30),
    "sm_103a": _chip("B300", (10, 3), 148, 2048, 65536, 227 << 10, 228 << 10, 126 << 20, 288 << 30),
    "sm_120": _chip("RTX PRO 6000", (12, 0), 188, 1536, 65536, 99 << 10, 100 << 10, 128 << 20, 96 << 30),
}
ARCHES = tuple(_ARCHES)

EMULATOR = dataclasses.replace(
    _ARCHES["sm_90a"], kind="emulator", name="H200 emulated on the CPU", memory_bytes=CPU.memory_bytes, here=True
)
"""Device with the figures of an H200; ``graphfuse.emulator`` runs its kernels."""


def for_arch(arch: str) -> Device:
    """The published record of a chip, by architecture name. Raises SettingError for an unknown one."""
    try:
        return _ARCHES[arch]
    except KeyError:
        raise SettingError(f"unknown architecture {arch!r}; known: {', '.join(ARCHES)}") from None


def for_sm(sm: int) -> Device:
    """The published record of a chip, by compute capability (``Device.sm``). Raises SettingError for an unknown one."""
    found = next((chip for chip in _ARCHES.values() if chip.sm == sm), None)
    if found is None:
        raise SettingError(f"unknown chip SM{sm}; known: {', '.join(str(chip.sm) for chip in _ARCHES.values())}")
    return found
