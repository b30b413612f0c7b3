"""Loads cubins and launches their kernels.

A launch block is memory for a kernel's arguments and a launch configuration of one stream. A call takes a block from a
pool, writes its arguments and grid into it, launches, and puts it back; by then the driver has copied the arguments. No
other call can use the block meanwhile, so any number of threads may launch at the same time.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuda.bindings import driver

from graphfuse.base.device import Device
from graphfuse.base.errors import DeviceError
from graphfuse.contract import engine
from graphfuse.contract.arguments import Packing
from graphfuse.runtime import device as devices
from graphfuse.runtime.bounded_dict import make_room

_STATIC_LIMIT = 48 << 10  # bytes of shared memory that a CTA may have without an opt-in
_PORTABLE_CLUSTER = 8
_STREAMS_KEPT = 64

Block = tuple[object, object, int, int, list, object]
"""A launch block: memory of the arguments; configuration of the launch; address of the configuration; address of the
table of the arguments' addresses; the pool that it is put back into; and the owner of the memory."""


@dataclass(frozen=True)
class KernelResources:
    """Resources of a kernel. registers: per thread. local_bytes: local memory per thread, including spills.
    shared_bytes: static shared memory per CTA."""

    registers: int
    local_bytes: int
    shared_bytes: int


class LoadedKernel:
    """A kernel of a loaded cubin on one device. It is thread-safe.

    function: its CUfunction in the device's primary context.
    """

    def __init__(self, code: object, entry: str, device: Device, function: object):
        self.entry = entry
        self.device = device
        self.function = function
        self._code = code  # keeps the library loaded
        self._context_address = int(devices.context(device.ordinal))
        self._shared_limit = 0
        self._lock = threading.Lock()
        attribute = driver.CUfunction_attribute
        self.resources = KernelResources(
            registers=self._get(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS),
            local_bytes=self._get(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            shared_bytes=self._get(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
        )

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r} on {self.device})"

    def launcher(self, launch: engine.Launch, dependent: bool = False) -> "Launcher":
        """Object that launches the kernel with this configuration.

        dependent: the kernel may begin before the previous one on the stream ends (programmatic dependent launch), for
        which it has to wait. Raises DeviceError if the device does not have enough shared memory.
        """
        self._allow(launch)
        return Launcher(self, launch, dependent)

    def elsewhere(self, error: int, start: Callable[[], int], launch: engine.Launch) -> None:
        """Handle a launch that the driver refused: retry it in the device's primary context, or raise DeviceError.

        The function belongs to this context. In any other one, such as on a thread that has not used CUDA or has
        another current device, the driver refuses it. Querying the context before each launch would take a tenth of the
        time of a launch.
        """
        _, now = driver.cuCtxGetCurrent()
        if int(now) != self._context_address:
            with devices.current(self.device.ordinal):
                error = start()
        devices.check(driver.CUresult(error), f"launching kernel {self.entry!r} on {self.device} with {_shape(launch)}")

    def _allow(self, launch: engine.Launch) -> None:
        """Opt in to more than 48 KB of shared memory, and to clusters of more than 8 CTAs, if the launch has these."""
        attribute = driver.CUfunction_attribute
        with self._lock:
            if launch.shared_bytes > self._shared_limit:
                if launch.shared_bytes + self.resources.shared_bytes > _STATIC_LIMIT:
                    self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes, launch)
                self._shared_limit = launch.shared_bytes
            if launch.cluster > _PORTABLE_CLUSTER:
                self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, launch)

    def resident_clusters(self, launch: engine.Launch, config: object) -> int:
        """Number of clusters of a launch that can be resident at once. It depends on how the device groups its SMs."""
        with devices.current(self.device.ordinal):
            error, count = driver.cuOccupancyMaxActiveClusters(self.function, config)
        devices.check(
            error, f"asking how much of {_shape(launch)} of kernel {self.entry!r} {self.device} holds at once"
        )
        if not count:
            raise DeviceError(f"{self.device} holds no cluster of kernel {self.entry!r} with {_shape(launch)}")
        return count

    def _get(self, attribute: object) -> int:
        error, value = driver.cuFuncGetAttribute(attribute, self.function)
        devices.check(error, f"reading {attribute.name} of kernel {self.entry!r} on {self.device}")
        return value

    def _set(self, attribute: object, value: int, launch: engine.Launch) -> None:
        with devices.current(self.device.ordinal):
            (error,) = driver.cuFuncSetAttribute(self.function, attribute, value)
        devices.check(error, f"preparing kernel {self.entry!r} on {self.device} for {_shape(launch)}")


class Launcher:
    """A kernel with its launch configuration, for any arguments, stream and number of rows.

    packing: layout of a block's memory. function: the kernel, as an argument of `launch`. launch: the driver's launch
    function; its arguments are the address of a block's configuration, `function`, the address of the block's table,
    and None; it returns the number of an error, 0 for success. waiting: the pool of each stream, by its address. The
    code that ``runtime.fastcall`` generates uses these.
    """

    def __init__(self, kernel: LoadedKernel, launch: engine.Launch, dependent: bool):
        self.packing = Packing(launch)
        self.function = int(kernel.function)
        self.launch = _driver_launch()
        self.waiting: dict[int, list[Block]] = {}
        self._kernel = kernel
        self._launch = launch
        self._dependent = dependent
        self._most = None  # maximum of resident CTAs, if it may be less than the grid
        if launch.cooperative and launch.cluster != 1 and launch.grid:
            self._most = launch.cluster * kernel.resident_clusters(launch, self._config(0, cooperative=False))

    def grid(self, rows: int) -> int:
        """Number of CTAs to launch for a number of rows. The launch has ``ByRows``."""
        return self._started(self._launch.by_rows.grid(rows))

    def new(self, stream: int) -> Block:
        """A new block for the stream, with the grid of the launch. The caller puts it into the pool after use."""
        waiting = self.waiting.get(stream)
        if waiting is None:
            make_room(self.waiting, _STREAMS_KEPT)
            waiting = self.waiting.setdefault(stream, [])
        config = self._config(stream, self._launch.cooperative)
        memory = _Arguments(self.packing)
        return memory.bytes, config, config.getPtr(), memory.table, waiting, memory

    def clear(self, stream: int, addresses: Sequence[int]) -> None:
        """Set 4 bytes at each address to zero."""
        if not addresses:
            return
        # The default stream belongs to the current device.
        with devices.current(self._kernel.device.ordinal):
            for address in addresses:
                (error,) = driver.cuMemsetD32Async(address, 0, 1, stream)
                devices.check(error, f"clearing 4 bytes for kernel {self._kernel.entry!r} on {self._kernel.device}")

    def refused(self, error: int, block: Block) -> None:
        """Handle a launch of this block that the driver refused, as ``LoadedKernel.elsewhere`` does."""
        self._kernel.elsewhere(error, lambda: self.launch(block[2], self.function, block[3], None), self._launch)

    def _started(self, grid: int) -> int:
        return grid if self._most is None else min(grid, self._most)

    def _config(self, stream: int, cooperative: bool) -> object:
        launch = self._launch
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
        if cooperative:
            config.gridDimX = self._started(launch.grid)
            value = driver.CUlaunchAttributeValue()
            value.cooperative = 1
            attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
        if self._dependent:
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
        if attributes:
            config.attrs = [_attribute(*pair) for pair in attributes]
            config.numAttrs = len(attributes)
        return config


class _Arguments:
    """Memory for a launch's arguments. table: address of the table of their addresses, for the driver.

    The driver also accepts arguments as one packed buffer, but cannot capture a cooperative launch of that form.
    """

    def __init__(self, packing: Packing):
        self.bytes = ctypes.create_string_buffer(max(packing.size, 1))
        first = ctypes.addressof(self.bytes)
        self._table = (ctypes.c_void_p * len(packing.offsets))(*[first + offset for offset in packing.offsets])
        self.table = ctypes.addressof(self._table) if packing.offsets else 0


@functools.cache
def _driver_launch() -> Callable[[int, int, int, None], int]:
    """cuLaunchKernelEx as a ctypes function; cuda.bindings' wrapper takes a quarter of a microsecond more."""
    version = 12000  # CUDA version of this signature
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    error, address, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", version, flags)
    devices.check(error, "looking up cuLaunchKernelEx")
    pointer = ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(int(address))


@functools.lru_cache(maxsize=1024)
def load(cubin: bytes, entry: str, device: Device) -> LoadedKernel:
    """Load a cubin and return its kernel `entry`, a name as in the binary (extern "C" in the source).

    Kernels are cached, as graphs that differ in the number of rows share a cubin. Raises DeviceError if the device
    cannot run the cubin, or the cubin has no such kernel.
    """
    from graphfuse.runtime.cuda_core import ObjectCode

    with devices.current(device.ordinal):
        try:
            code = ObjectCode.from_cubin(cubin, name=entry)
            kernel = int(code.get_kernel(entry).handle)
        except Exception as error:  # cuda.core's CUDAError, which it does not export
            raise DeviceError(f"loading kernel {entry!r} on {device} ({device.arch}): {error}") from None
        error, function = driver.cuKernelGetFunction(driver.CUkernel(kernel))
        devices.check(error, f"loading kernel {entry!r} on {device}")
        return LoadedKernel(code, entry, device, function)


def _attribute(kind: object, value: object) -> object:
    attribute = driver.CUlaunchAttribute()
    attribute.id, attribute.value = kind, value
    return attribute


def _shape(launch: engine.Launch) -> str:
    return (
        f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}, "
        f"{launch.shared_bytes} bytes of shared memory{', cooperative' if launch.cooperative else ''}"
    )
