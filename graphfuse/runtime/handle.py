"""cuDNN's handle: a device and the stream that work runs on."""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

from graphfuse.base.device import Device
from graphfuse.base.errors import DeviceError, GraphStateError, GraphTypeError
from graphfuse.runtime import device as devices
from graphfuse.runtime import torch_private


class Handle:
    """A device and a stream; made by `create_handle`. Until `set_stream`, the stream is torch's current one."""

    __slots__ = ("_device", "_stream", "_destroyed")

    def __init__(self, device: Device):
        self._device = device
        self._stream: int | None = None
        self._destroyed = False

    @property
    def device(self) -> Device:
        """The device that graphs built with this handle run on. Raises GraphStateError once destroyed."""
        return alive(self)._device

    @property
    def stream(self) -> int:
        """The stream that graphs executed with this handle run on. Raises GraphStateError once destroyed."""
        return get_stream(self)

    def __repr__(self) -> str:
        stream = "torch's current stream" if self._stream is None else f"stream {self._stream:#x}"
        state = "destroyed" if self._destroyed else stream
        return f"Handle({self._device}, {state})"


def create_handle(device: str | int | None = None) -> Handle:
    """A handle for a device, by default the current one. Argument and errors as in ``runtime.device.get``."""
    return Handle(devices.get(device))


def destroy_handle(handle: Handle) -> None:
    """End a handle's life: any later use of it raises GraphStateError."""
    alive(handle)._destroyed = True


def set_stream(handle: Handle, stream: object) -> None:
    """Set the stream for later work of the handle.

    stream: an address, a torch.cuda.Stream, or any object with `__cuda_stream__`. Raises TypeError for anything else,
    DeviceError for a torch.cuda.Stream of another device.
    """
    alive(handle)
    # A torch.cuda.Stream knows its device; numbers do not.
    place = getattr(stream, "device_index", None)
    if handle._device.kind == "cuda" and isinstance(place, int) and place != handle._device.ordinal:
        raise DeviceError(f"stream {stream!r} is one of cuda:{place}; accepted: streams of {handle._device}")
    handle._stream = stream_address(stream)


def get_stream(handle: Handle) -> int:
    """The address of the stream that the handle's work runs on now."""
    stream = alive(handle)._stream
    return current_stream(handle._device) if stream is None else stream


def stream_on(device: Device, handle: Handle | None) -> int:
    """The address of the stream for work on `device`: the handle's, or torch's current one without a handle.

    Raises the errors of `alive`, and DeviceError for a handle of another device.
    """
    if handle is None:
        return current_stream(device)
    place = alive(handle)._device
    if place is not device and place != device:
        raise DeviceError(f"the graph is planned for {device.described}; the handle is for {place.described}")
    return current_stream(device) if handle._stream is None else handle._stream


def stream_getter(device: Device, handle: Handle | None) -> Callable[[], int]:
    """Function that returns `stream_on(device, handle)`, for repeated calls."""
    torch = sys.modules.get("torch")
    if handle is None and device.kind == "cuda" and torch is not None and torch.cuda.is_initialized():
        return functools.partial(torch_private.raw_stream(), device.ordinal)
    return functools.partial(stream_on, device, handle)


def stream_address(stream: Any) -> int:
    """The address of a stream given in any accepted form (see `set_stream`)."""
    protocol: Any = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # Version 0 of the protocol: (version, address). It is a method now; earlier it was a property.
        _, address = protocol() if callable(protocol) else protocol
        return int(address)
    try:
        return operator.index(getattr(stream, "cuda_stream", stream))
    except TypeError:
        raise TypeError(
            f"{stream!r} is not a stream; accepted: an address, a torch.cuda.Stream, an object with __cuda_stream__"
        ) from None


def current_stream(device: Device) -> int:
    """The stream that torch uses on the device in this thread; 0 if torch has not initialized CUDA."""
    return _raw_stream(device.ordinal) if device.kind == "cuda" else 0


def _first_raw_stream(ordinal: int) -> int:
    """`_raw_stream` until torch initializes CUDA; then it replaces itself by torch's function, which is faster."""
    global _raw_stream
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    _raw_stream = torch_private.raw_stream()
    return _raw_stream(ordinal)


_raw_stream: Callable[[int], int] = _first_raw_stream


def alive(handle: Handle) -> Handle:
    """`handle` itself. Raises GraphTypeError if it is no handle, GraphStateError if it is destroyed."""
    if not isinstance(handle, Handle):
        raise GraphTypeError(f"{handle!r} is not a handle; accepted: what create_handle returns")
    if handle._destroyed:
        raise GraphStateError(f"the handle of {handle._device} was used after destroy_handle")
    return handle
