"""The devices of this machine, with properties from the CUDA driver, as ``graphfuse.base.device.Device``."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.base import settings
from graphfuse.base.device import CPU, EMULATOR, Device
from graphfuse.base.errors import DeviceError, SettingError

FIGURES = {
    "sm_count": "MULTIPROCESSOR_COUNT",
    "threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "shared_memory_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_memory_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "l2_bytes": "L2_CACHE_SIZE",
}
"""Fields of Device, and the name of the driver's attribute (CU_DEVICE_ATTRIBUTE_*) of each."""
_WITHOUT_DRIVER = {str(device): device for device in (CPU, EMULATOR)}
_contexts: dict[int, object] = {}
_lock = threading.Lock()


@functools.cache
def count() -> int:
    """Number of CUDA devices; 0 without a driver. Never raises."""
    try:
        from cuda.bindings import driver

        (error,) = driver.cuInit(0)
        if error:
            return 0
        error, number = driver.cuDeviceGetCount()
        return 0 if error else number
    except (RuntimeError, ImportError, OSError):  # cuda.bindings raises these if there is no libcuda
        return 0


def driver_version() -> int:
    """The CUDA version of the driver, such as 13000 for 13.0. Raises DeviceError if the driver does not report it."""
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    check(error, "reading the driver's version")
    return version


def get(spec: str | int | None = None) -> Device:
    """The device that `spec` names.

    spec: "cpu", "cuda" (the current one of this thread), "cuda:N", N, "emulator", or an object whose text is one of
    these (a torch.device). With None, it is the device of GRAPHFUSE_DEVICE, else the CUDA device that is current on
    this thread, else the CPU. Raises SettingError for another text, DeviceError for a device that is not there.
    """
    if spec is None:
        spec = settings.device()
        if spec is None:
            return _record(_current()) if count() else CPU
    match = settings.DEVICE.fullmatch(f"cuda:{spec}" if type(spec) is int else str(spec))
    if match is None:
        raise SettingError(f"{spec!r} is not a device; accepted: cpu, cuda, cuda:N, the number N, emulator")
    if match[0] in _WITHOUT_DRIVER:
        return _WITHOUT_DRIVER[match[0]]
    if not count():
        raise DeviceError(
            f"device {spec!r} was asked for, but there is no CUDA device or no driver; accepted: cpu, emulator"
        )
    ordinal = _current() if match[1] is None else int(match[1])
    if ordinal >= count():
        raise DeviceError(f"device {spec!r} is not there; accepted: cpu, cuda:0 to cuda:{count() - 1}")
    return _record(ordinal)


@dataclass(frozen=True)
class Target:
    """Device that a graph is to be planned for. This machine may not have it.

    exact: whether a device of this machine must have the same properties to be used instead; if False, the same SM is
    enough.
    """

    device: Device
    exact: bool

    def met_by(self, found: Device) -> bool:
        """True if the graph can be planned for this device of the machine and run on it."""
        if not found.runs_kernels or found.sm != self.device.sm:
            return False
        return not self.exact or all(getattr(found, name) == getattr(self.device, name) for name in FIGURES)


def chosen(target: Target | None, given: Device | None) -> Device:
    """Device to plan for. given: the handle's device; None without a handle.

    It is the handle's, else the current one (``get``). If the current device does not meet the target, it is the
    target's device, which is not on this machine. Raises DeviceError if the handle's device does not meet the target.
    """
    if target is None:
        return given or get()
    if given is None:
        found = get()
        return found if target.met_by(found) else target.device
    if not target.met_by(given):
        raise DeviceError(
            f"the graph is to be planned for {target.device.arch} ({target.device.name}), and the handle is for "
            f"{given.described}; accepted: no handle, or that of such a device"
        )
    return given


def check(error: int, doing: str) -> None:
    """Raises DeviceError with the driver's name and text of `error`, unless it is success."""
    if error:
        from cuda.bindings import driver

        _, name = driver.cuGetErrorName(error)
        _, text = driver.cuGetErrorString(error)
        raise DeviceError(f"{doing}: {(name or b'unknown error').decode()} ({(text or b'no description').decode()})")


def context(ordinal: int) -> object:
    """The primary context of a device, which torch and the CUDA runtime use. It is retained until the process ends."""
    found = _contexts.get(ordinal)
    if found is None:
        from cuda.bindings import driver

        with _lock:
            found = _contexts.get(ordinal)
            if found is None:
                error, found = driver.cuDevicePrimaryCtxRetain(ordinal)
                check(error, f"taking the primary context of cuda:{ordinal}")
                _contexts[ordinal] = found
    return found


@contextlib.contextmanager
def current(ordinal: int) -> Iterator[None]:
    """Context in which the device is current on this thread. The previous one is restored afterwards."""
    from cuda.bindings import driver

    (error,) = driver.cuCtxPushCurrent(context(ordinal))
    check(error, f"making cuda:{ordinal} current")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def pointer_device(address: int) -> str | None:
    """Device of an address ("cuda:N"); None if the driver does not know the address."""
    if not address or not count():
        return None
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = driver.cuPointerGetAttribute(attribute, address)
    return None if error or ordinal < 0 else f"cuda:{ordinal}"


def _current() -> int:
    # The driver's state reflects torch.cuda.set_device and torch.cuda.device. In a thread without a context, the device
    # is 0, as in torch.
    from cuda.bindings import driver

    error, ordinal = driver.cuCtxGetDevice()
    return 0 if error else int(ordinal)


@functools.cache
def _record(ordinal: int) -> Device:
    from cuda.bindings import driver

    def attribute(name: str) -> int:
        error, value = driver.cuDeviceGetAttribute(
            getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), ordinal
        )
        check(error, f"reading {name} of cuda:{ordinal}")
        return value

    error, name = driver.cuDeviceGetName(128, ordinal)
    check(error, f"reading the name of cuda:{ordinal}")
    error, memory = driver.cuDeviceTotalMem(ordinal)
    check(error, f"reading the memory of cuda:{ordinal}")
    return Device(
        kind="cuda",
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        memory_bytes=int(memory),
        **{field: attribute(name) for field, name in FIGURES.items()},
    )
