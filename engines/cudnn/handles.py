"""cuDNN's handles of one device: one per thread, because two threads may not use one at the same time."""

import atexit
import contextlib
import threading
from types import ModuleType


class Handles:
    """Handles are made when a thread first asks. Those of threads that have ended are given to new ones; all are
    destroyed when the process ends, because destroying one waits for the device and breaks a capture of any stream.

    threads: has this thread's ``lease.handle``, once it asked. A call reads it there; a method would take as long as
    all the rest of a call's Python."""

    def __init__(self, cudnn: ModuleType, ordinal: int):
        self.ordinal = ordinal
        self._cudnn = cudnn
        self.threads = threading.local()
        self._lock = threading.Lock()
        self._all: list[object] = []
        self._free: list[object] = []
        atexit.register(self.destroy)

    def mine(self) -> object:
        """This thread's handle. The device is the thread's current one. RuntimeError where cuDNN makes none."""
        try:
            return self.threads.lease.handle
        except AttributeError:
            self.threads.lease = lease = _Lease(self._another(), self._free)
            return lease.handle

    def direct(self, handle: object, stream: int) -> None:
        """Has the handle's work go to `stream`, an address."""
        self._cudnn.set_stream(handle=handle, stream=stream)

    def _another(self) -> object:
        with self._lock:
            if not self._free:
                handle = self._cudnn.create_handle()
                self._all.append(handle)
                return handle
            handle = self._free.pop()
        # The thread may have no context yet, which a call of the CUDA runtime gives it.
        import torch

        torch.cuda.mem_get_info(self.ordinal)
        return handle

    def destroy(self) -> None:
        """All handles, whichever threads have them: none may be used any more."""
        with self._lock:
            handles, self._all[:], self._free[:] = list(self._all), (), ()
        for handle in handles:
            with contextlib.suppress(RuntimeError):  # CUDA may be gone before the process is
                self._cudnn.destroy_handle(handle)


class _Lease:
    """A thread's hold of a handle; it ends with the thread."""

    __slots__ = ("handle", "_free")

    def __init__(self, handle: object, free: list[object]):
        self.handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)
