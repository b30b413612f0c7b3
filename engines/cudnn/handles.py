"""cuDNN handles for one device: one per thread, because two threads must not use a handle at the same time."""

import atexit
import contextlib
import threading
from types import ModuleType


class Handles:
    """The handles of a device. A thread gets one at its first request. New threads reuse those of ended threads.

    They are destroyed when the process ends, because destroying one waits for the device and breaks a capture of any
    stream.

    threads: has this thread's ``lease.handle`` after its first request. Calls read it directly, as a method call would
    take as long as the rest of their Python code."""

    def __init__(self, cudnn: ModuleType, ordinal: int):
        self.ordinal = ordinal
        self._cudnn = cudnn
        self.threads = threading.local()
        self._lock = threading.Lock()
        self._all: list[object] = []
        self._free: list[object] = []
        atexit.register(self.destroy)

    def mine(self) -> object:
        """This thread's handle. The device must be current. Raises RuntimeError if cuDNN cannot make one."""
        try:
            return self.threads.lease.handle
        except AttributeError:
            self.threads.lease = lease = _Lease(self._another(), self._free)
            return lease.handle

    def direct(self, handle: object, stream: int) -> None:
        """Set the handle's stream. stream: an address."""
        self._cudnn.set_stream(handle=handle, stream=stream)

    def _another(self) -> object:
        with self._lock:
            if not self._free:
                handle = self._cudnn.create_handle()
                self._all.append(handle)
                return handle
            handle = self._free.pop()
        # The thread may have no CUDA context yet; a call of the CUDA runtime makes one current.
        import torch

        torch.cuda.mem_get_info(self.ordinal)
        return handle

    def destroy(self) -> None:
        """Destroy the handles of all threads. None may be used afterwards."""
        with self._lock:
            handles, self._all[:], self._free[:] = list(self._all), (), ()
        for handle in handles:
            with contextlib.suppress(RuntimeError):  # CUDA may be shut down already
                self._cudnn.destroy_handle(handle)


class _Lease:
    """A thread's handle. When the thread ends, the handle becomes free."""

    __slots__ = ("handle", "_free")

    def __init__(self, handle: object, free: list[object]):
        self.handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)
