"""``Bound``: a plan on fixed buffers, which ``graph.bind`` returns."""

import sys
from collections.abc import Callable, Mapping
from typing import Any


class Bound:
    """A callable that runs a plan on the buffers it was made with, without checks.

    A call does the same as execute with these arguments, but only launches. It runs on the stream that the handle, or
    torch, uses at the time of the call. Any thread may call it, and a CUDA graph may capture it. Numbers passed by
    value keep their values of bind.

    The buffers, and the memory that torch tensors had at bind, live as long as this object. Calls use the addresses of
    bind, even if a tensor gets other memory or another shape later (``set_``, ``.data =``, a smaller ``resize_``).
    Growing a tensor in place (``resize_``) frees its memory, which cannot be detected: bind again after that.
    """

    def __init__(
        self, start: Callable[[int], None], pack: Mapping[Any, object], workspace: object, stream: Callable[[], int]
    ):
        self._start = start
        self._kept = [_memory(value) for value in (*pack.values(), workspace)]
        self._stream = stream
        stream()

    def __call__(self) -> None:
        """Run the plan. Raises GraphStateError once the handle is destroyed, DeviceError with the driver's error."""
        self._start(self._stream())


def _memory(value: object) -> tuple[object, ...]:
    """A value, and the memory of a torch tensor, as the tensor could get other memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value, value.untyped_storage()
    return (value,)
