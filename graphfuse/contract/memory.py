"""Memory at an address as a torch tensor. The caller keeps the memory alive."""

import ctypes

from graphfuse.base.device import Device


def wrap(torch, address: int, size: int, device: Device):
    """`size` bytes (uint8, one axis) on `device`, not copied."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device.memory)
    if device.memory == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, size), device=device.memory)


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
