"""Loading a cubin and launching its kernel.

A launch is frozen once, its arguments packed, and then only started: no packing, no lock and
nothing shared that changes.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from graphfuse import engine
from graphfuse.arguments import Packing
from graphfuse.device import Device
from graphfuse.errors import DeviceError
from graphfuse.runtime import device as devices

_STATIC_LIMIT = 48 << 10  # shared memory a block gets without asking for more
_PORTABLE_CLUSTER = 8
_CONFIGS_KEPT = 64

Start = Callable[[], tuple[int]]
"""One of the driver's launch functions with all of its arguments."""


@dataclass(frozen=True)
class Attributes:
    """What a kernel uses: registers and local memory (bytes, spills among them) a thread, static shared bytes a CTA."""

    registers: int
    local_bytes: int
    shared_bytes: int


class Kernel:
    """A kernel of a loaded cubin on one device. Any number of threads may run it at once.

    function: its handle in the device's primary context, as the driver's launch functions take it.
    """

    def __init__(self, code: object, entry: str, device: Device, function: object):
        from cuda.bindings import driver

        self.entry = entry
        self.device = device
        self.function = function
        self._code = code  # keeps the library loaded
        self._driver = driver
        self._context_address = int(devices.context(device.ordinal))
        self._shared_limit = 0
        self._lock = threading.Lock()
        attribute = driver.CUfunction_attribute
        self.attributes = Attributes(
            registers=self._get(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS),
            local_bytes=self._get(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            shared_bytes=self._get(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
        )

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r} on {self.device})"

    def launcher(self, launch: engine.Launch) -> "Launcher":
        """What starts the kernel as `launch` says. DeviceError where the device has not so much shared memory."""
        self._allow(launch)
        return Launcher(self, launch)

    def run(
        self, launch: engine.Launch, buffers: engine.Buffers, scratch: int, stream: int, dependent: bool = False
    ) -> None:
        """Start the kernel once; arguments and errors as of ``Launcher.freeze`` and what that returns."""
        self.launcher(launch).freeze(buffers, scratch, stream, dependent)()

    def elsewhere(self, error: int, start: Start, launch: engine.Launch) -> None:
        """Deal with a start that the driver refused: start again if that was for the current context alone.

        The function belongs to the device's primary context, so in any other - on a thread that has not
        touched CUDA, or one whose current device is another - the driver refuses it. To ask for the
        current context before each launch would cost a tenth of the launch.
        """
        _, now = self._driver.cuCtxGetCurrent()
        if int(now) != self._context_address:
            with devices.current(self.device.ordinal):
                error = start()[0]
        devices.check(error, f"launching kernel {self.entry!r} on {self.device} with {_shape(launch)}")

    def _allow(self, launch: engine.Launch) -> None:
        """Opt in to more shared memory than every block gets, and to large clusters."""
        attribute = self._driver.CUfunction_attribute
        with self._lock:
            if launch.shared_bytes > self._shared_limit:
                if launch.shared_bytes + self.attributes.shared_bytes > _STATIC_LIMIT:
                    self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes, launch)
                self._shared_limit = launch.shared_bytes
            if launch.cluster > _PORTABLE_CLUSTER:
                self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, launch)

    def resident_clusters(self, launch: engine.Launch, config: object) -> int:
        """How many clusters of a launch the device holds at once, which depends on how its SMs are grouped."""
        with devices.current(self.device.ordinal):
            error, count = self._driver.cuOccupancyMaxActiveClusters(self.function, config)
        devices.check(
            error, f"asking how much of {_shape(launch)} of kernel {self.entry!r} {self.device} holds at once"
        )
        if not count:
            raise DeviceError(f"{self.device} holds no cluster of kernel {self.entry!r} with {_shape(launch)}")
        return count

    def _get(self, attribute: object) -> int:
        error, value = self._driver.cuFuncGetAttribute(attribute, self.function)
        devices.check(error, f"reading {attribute.name} of kernel {self.entry!r} on {self.device}")
        return value

    def _set(self, attribute: object, value: int, launch: engine.Launch) -> None:
        with devices.current(self.device.ordinal):
            (error,) = self._driver.cuFuncSetAttribute(self.function, attribute, value)
        devices.check(error, f"preparing kernel {self.entry!r} on {self.device} for {_shape(launch)}")


class Launcher:
    """A kernel with how it is started; only buffers and stream are open."""

    def __init__(self, kernel: Kernel, launch: engine.Launch):
        from cuda.bindings import driver

        self._kernel = kernel
        self._launch = launch
        self._driver = driver
        self._packing = Packing(launch.arguments)
        self._configs: dict[tuple[int, bool], object] = {}

    def freeze(self, buffers: engine.Buffers, scratch: int, stream: int, dependent: bool = False) -> Callable[[], None]:
        """A launch with everything packed; calling it starts the kernel, on any thread and any number of times.

        scratch: address that the launch's Scratch offsets count from. dependent: the kernel may begin before
        the one before it on the stream ends (programmatic dependent launch), which only a kernel that
        waits for it may. The thread's current device stays what it was. The call raises DeviceError with
        what the driver reports.
        """
        launch, driver = self._launch, self._driver
        starts: list[Start] = [
            functools.partial(driver.cuMemsetD32Async, buffers.address(tensor), 0, 1, stream)
            for tensor in launch.cleared
        ]
        packed = None
        if launch.grid:
            packed = _Packed(self._packing, buffers, scratch)
            config = self._config(stream, dependent)
            starts.append(functools.partial(driver.cuLaunchKernelEx, config, self._kernel.function, packed.address, 0))
        if not starts:
            return _nothing
        start = starts[0] if len(starts) == 1 else functools.partial(_in_turn, starts)
        return _frozen(start, self._kernel.elsewhere, launch, packed)

    def _config(self, stream: int, dependent: bool) -> object:
        """What cuLaunchKernelEx takes. Kept: it does not depend on the buffers."""
        config = self._configs.get((stream, dependent))
        if config is None:
            if len(self._configs) >= _CONFIGS_KEPT:
                self._configs.clear()
            config = self._configs[stream, dependent] = self._new_config(stream, dependent)
        return config

    def _new_config(self, stream: int, dependent: bool) -> object:
        launch, driver = self._launch, self._driver
        kinds = driver.CUlaunchAttributeID
        attributes = []
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = driver.CUstream(stream)
        if launch.cluster != 1:
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = launch.cluster, 1, 1
            attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if launch.cooperative:
            if launch.cluster != 1:
                _set_attributes(driver, config, attributes)
                config.gridDimX = min(launch.grid, launch.cluster * self._kernel.resident_clusters(launch, config))
            value = driver.CUlaunchAttributeValue()
            value.cooperative = 1
            attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
        if dependent:
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
        _set_attributes(driver, config, attributes)
        return config


def _in_turn(starts: list[Start]) -> tuple[int]:
    for start in starts:
        result = start()
        if result[0]:
            break
    return result


def _frozen(start: Start, refused: Callable, launch: engine.Launch, packed: "_Packed | None") -> Callable[[], None]:
    def call() -> None:
        error = start()[0]
        if error:
            refused(error, start, launch)

    call.memory = packed  # as long as the call is
    return call


def _nothing() -> None:
    """The launch of an empty grid."""


@functools.lru_cache(maxsize=1024)
def load(cubin: bytes, entry: str, device: Device) -> Kernel:
    """Load a cubin and take its kernel `entry` (a name as the binary has it, so extern "C" in the source).

    Kept: graphs that differ in the number of rows share a cubin, and so its kernel.

    Raises DeviceError where the device cannot run the cubin or it has no such kernel.
    """
    from graphfuse.runtime.cuda_core import ObjectCode

    with devices.current(device.ordinal):
        try:
            code = ObjectCode.from_cubin(cubin, name=entry)
            kernel = int(code.get_kernel(entry).handle)
        except Exception as error:  # cuda.core's CUDAError, which it does not export
            raise DeviceError(f"loading kernel {entry!r} on {device} ({device.arch}): {error}") from None
        from cuda.bindings import driver

        error, function = driver.cuKernelGetFunction(driver.CUkernel(kernel))
        devices.check(error, f"loading kernel {entry!r} on {device}")
        return Kernel(code, entry, device, function)


class _Packed:
    """Packed arguments, never changed. address: that of a table of theirs, as the driver takes them.

    The driver would take the packed bytes as one, too, but captures no cooperative launch that comes so.
    """

    def __init__(self, packing: Packing, buffers: engine.Buffers, scratch: int):
        self._bytes = ctypes.create_string_buffer(max(packing.size, 1))
        packing.into(self._bytes, buffers, scratch)
        first = ctypes.addressof(self._bytes)
        self._table = (ctypes.c_void_p * len(packing.offsets))(*[first + offset for offset in packing.offsets])
        self.address = ctypes.addressof(self._table) if packing.offsets else 0


def _set_attributes(driver, config: object, attributes: list[tuple[object, object]]) -> None:
    if attributes:
        config.attrs = [_attribute(driver, *pair) for pair in attributes]
        config.numAttrs = len(attributes)


def _attribute(driver, kind: object, value: object) -> object:
    attribute = driver.CUlaunchAttribute()
    attribute.id, attribute.value = kind, value
    return attribute


def _shape(launch: engine.Launch) -> str:
    return (
        f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}, "
        f"{launch.shared_bytes} bytes of shared memory{', cooperative' if launch.cooperative else ''}"
    )
