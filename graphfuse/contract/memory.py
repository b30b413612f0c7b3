"""Memory at an address as a torch tensor, and a stream at an address as torch's. The caller keeps both alive."""

import ctypes
from contextlib import nullcontext

from graphfuse.base.device import Device


def wrap(torch, address: int, size: int, device: Device):
    """`size` bytes (uint8, one axis) on `device`, not copied."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device.memory)
    if device.memory == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, size), device=device.memory)


def on(torch, device: Device, stream: int):
    """Context in which torch works on `device`, on the stream at an address (0: the default stream)."""
    if device.memory == "cpu":
        # With a device for a context each operation goes by way of Python, which takes as long as a small one.
        return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    # ExternalStream takes the default stream's address, 0, for none and makes a stream of its own.
    given = (
        torch.cuda.ExternalStream(stream, device=device.ordinal)
        if stream
        else torch.cuda.default_stream(device.ordinal)
    )
    return torch.cuda.stream(given)


class _CudaBytes:
    """Object that torch reads an address from."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
