"""Torch tensors for memory at an address, and torch streams for a stream's address. The caller keeps both alive."""

import ctypes
from contextlib import nullcontext

from graphfuse.base.device import Device


def wrap(torch, address: int, size: int, device: Device):
    """Tensor of `size` bytes (uint8, one axis) on `device`, without a copy."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device.memory)
    if device.memory == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, size), device=device.memory)


def on(torch, device: Device, stream: int):
    """Context in which torch works on `device`, on the stream at an address (0: the default stream)."""
    if device.memory == "cpu":
        # A torch.device as context sends each operation through Python, which takes as long as a small one.
        return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    # ExternalStream(0) would create a new stream instead of using the default one.
    given = (
        torch.cuda.ExternalStream(stream, device=device.ordinal)
        if stream
        else torch.cuda.default_stream(device.ordinal)
    )
    return torch.cuda.stream(given)


class _CudaBytes:
    """Object with the CUDA array interface, from which torch makes a tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
