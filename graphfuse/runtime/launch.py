"""Loading a cubin and launching its kernel.

The hot path takes no lock: what a launch fills in belongs to the calling thread. It
packs all arguments with one `struct` call into the buffer form of the driver's launch
functions, whose layout is that of C with native alignment.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from graphfuse import engine
from graphfuse.device import Device
from graphfuse.errors import DeviceError
from graphfuse.runtime import device as devices

_CTYPES = {"pointer": "Q", "int32": "i", "int64": "q", "float32": "f"}  # codes of `struct`
_STATIC_LIMIT = 48 << 10  # shared memory a block gets without asking for more
_PORTABLE_CLUSTER = 8
_FRAMES_KEPT = 64

# cuLaunchKernel's `extra`: CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END.
_POINTER, _SIZE, _END = 1, 2, 0


@dataclass(frozen=True)
class Attributes:
    """What a kernel uses: registers and local memory (bytes, spills among them) a thread, static shared bytes a CTA."""

    registers: int
    local_bytes: int
    shared_bytes: int


class Kernel:
    """A kernel of a loaded cubin on one device. Any number of threads may run it at once."""

    def __init__(self, code: object, entry: str, device: Device, kernel: object):
        from cuda.bindings import driver

        self.entry = entry
        self.device = device
        self._code = code  # keeps the library loaded
        self._driver = driver
        self._kernel = driver.CUkernel(int(kernel))
        self._function = driver.CUfunction(int(kernel))
        self._context = devices.context(device.ordinal)
        self._context_address = int(self._context)
        self._shared_limit = 0
        self._lock = threading.Lock()
        self._frames = _Frames()
        attribute = driver.CUfunction_attribute
        self.attributes = Attributes(
            registers=self._get(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS),
            local_bytes=self._get(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            shared_bytes=self._get(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
        )

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r} on {self.device})"

    def run(self, launch: engine.Launch, buffers: engine.Buffers, scratch: int, stream: int) -> None:
        """Start the kernel on `stream`.

        scratch: address that the launch's Scratch offsets count from. The thread's current
        device stays what it was. Raises DeviceError with what the driver reports.
        """
        if launch.grid == 0:
            return
        frame = self._frame(launch)
        frame.fill(buffers, scratch)
        driver = self._driver
        error, now = driver.cuCtxGetCurrent()
        if not error and int(now) == self._context_address:
            error = self._start(frame, stream)
        else:
            # A thread that has not touched CUDA, or one whose current device is another.
            (error,) = driver.cuCtxPushCurrent(self._context)
            if not error:
                try:
                    error = self._start(frame, stream)
                finally:
                    driver.cuCtxPopCurrent()
        if error:
            devices.check(error, f"launching kernel {self.entry!r} on {self.device} with {_shape(launch)}")

    def _start(self, frame: "_Frame", stream: int) -> int:
        launch = frame.launch
        if frame.config is None:
            return self._driver.cuLaunchKernel(
                self._function, launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream, 0, frame.extra
            )[0]
        frame.config.hStream = self._driver.CUstream(stream)
        return self._driver.cuLaunchKernelEx(frame.config, self._function, 0, frame.extra)[0]

    def _frame(self, launch: engine.Launch) -> "_Frame":
        # By identity: hashing a Launch would cost more than the launch does.
        frames = self._frames.by_launch
        frame = frames.get(id(launch))
        if frame is None or frame.launch is not launch:
            if len(frames) >= _FRAMES_KEPT:
                frames.clear()
            self._allow(launch)
            frame = frames[id(launch)] = _Frame(launch, self._cluster_config(launch))
        return frame

    def _cluster_config(self, launch: engine.Launch) -> object | None:
        if launch.cluster == 1:
            return None
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = launch.cluster, 1, 1
        attribute.value = value
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.attrs = [attribute]
        config.numAttrs = 1
        return config

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

    def _get(self, attribute: object) -> int:
        error, value = self._driver.cuKernelGetAttribute(attribute, self._kernel, self.device.ordinal)
        devices.check(error, f"reading {attribute.name} of kernel {self.entry!r} on {self.device}")
        return value

    def _set(self, attribute: object, value: int, launch: engine.Launch) -> None:
        (error,) = self._driver.cuKernelSetAttribute(attribute, value, self._kernel, self.device.ordinal)
        devices.check(error, f"preparing kernel {self.entry!r} on {self.device} for {_shape(launch)}")


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
            kernel = code.get_kernel(entry).handle
        except Exception as error:  # cuda.core's CUDAError, which it does not export
            raise DeviceError(f"loading kernel {entry!r} on {device} ({device.arch}): {error}") from None
        return Kernel(code, entry, device, kernel)


class _Frame:
    """One thread's memory for one Launch: where its arguments are packed, and what the driver is given."""

    def __init__(self, launch: engine.Launch, config: object | None):
        self.launch = launch
        self.config = config
        self._layout = struct.Struct("@" + "".join(_code(a) for a in launch.arguments))
        self._values = tuple(_VALUES[type(a)](a) for a in launch.arguments)
        self._packed = ctypes.create_string_buffer(max(self._layout.size, 1))
        self._size = ctypes.c_size_t(self._layout.size)
        where = (_POINTER, ctypes.addressof(self._packed), _SIZE, ctypes.addressof(self._size), _END)
        self._extra = (ctypes.c_void_p * len(where))(*where)
        self.extra = ctypes.addressof(self._extra) if launch.arguments else 0

    def fill(self, buffers: engine.Buffers, scratch: int) -> None:
        self._layout.pack_into(self._packed, 0, *[value(buffers, scratch) for value in self._values])


class _Frames(threading.local):
    """The frames of the calling thread by the identity of their Launch."""

    def __init__(self):
        self.by_launch: dict[int, _Frame] = {}


Value = Callable[[engine.Buffers, int], float | int]


def _address(argument: engine.Address) -> Value:
    tensor = argument.tensor
    return lambda buffers, scratch: buffers.address(tensor)


def _host_scalar(argument: engine.HostScalar) -> Value:
    tensor = argument.tensor
    return lambda buffers, scratch: buffers.scalar(tensor)


def _scratch(argument: engine.Scratch) -> Value:
    offset = argument.offset
    return lambda buffers, scratch: scratch + offset


def _constant(argument: engine.Constant) -> Value:
    number = argument.value
    return lambda buffers, scratch: number


_VALUES = {
    engine.Address: _address,
    engine.HostScalar: _host_scalar,
    engine.Scratch: _scratch,
    engine.Constant: _constant,
}
_CODES = {engine.Address: "pointer", engine.HostScalar: "float32", engine.Scratch: "pointer"}


def _code(argument: engine.Argument) -> str:
    return _CTYPES[argument.ctype if isinstance(argument, engine.Constant) else _CODES[type(argument)]]


def _shape(launch: engine.Launch) -> str:
    return (
        f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}, "
        f"{launch.shared_bytes} bytes of shared memory"
    )
