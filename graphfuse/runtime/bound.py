"""What ``graph.bind`` returns: a plan on fixed buffers."""

import sys
from collections.abc import Callable, Mapping
from typing import Any


class Bound:
    """Call it to run the graph on the buffers it was made with; everything was checked then.

    A call is what execute would be with the same arguments, but the launch alone: it goes to the
    stream that the handle, or torch, uses at the time of the call. Any thread may call it, and it
    may be captured into a CUDA graph. Numbers passed by value keep what they were at bind.

    The buffers, and the memory that torch tensors had at bind, live as long as this object. It
    is the addresses of then that count: a tensor given other memory or another shape later
    (``set_``, ``.data =``, a smaller ``resize_``) does not change what a call reads and writes.
    Only growing a tensor in place (``resize_``) frees the memory under it, which nothing can
    notice: bind again after that.
    """

    def __init__(
        self, start: Callable[[int], None], pack: Mapping[Any, object], workspace: object, stream: Callable[[], int]
    ):
        self._start = start
        self._kept = [_memory(value) for value in (*pack.values(), workspace)]
        self._stream = stream
        stream()

    def __call__(self) -> None:
        """Raises GraphStateError once the handle is destroyed, DeviceError with what the driver reports."""
        self._start(self._stream())


def _memory(value: object) -> tuple[object, ...]:
    """A value, and where it is a torch tensor also its memory, which it could exchange for other."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value, value.untyped_storage()
    return (value,)
