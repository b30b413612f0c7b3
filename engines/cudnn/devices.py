"""The device that cuDNN uses: the current one of the thread in the CUDA runtime."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from graphfuse.base.device import Device
from graphfuse.contract.engine import No


def why_not(device: Device) -> No | None:
    """Why cuDNN cannot plan for a device; None if it can. The device must be on this machine, as cuDNN queries it."""
    import torch

    if not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        return No(f"torch {torch.__version__} {why}, by which {device} is made current for cuDNN")
    if device.ordinal >= torch.cuda.device_count():
        return No(f"cuDNN plans for devices of this machine, of which torch sees no {device}")
    found = torch.cuda.get_device_capability(device.ordinal)
    if found != device.compute_capability:
        major, minor = found
        return No(
            f"cuDNN plans for devices of this machine, whose {device} is SM{major}{minor}; the graph is planned for "
            f"{device.arch}"
        )
    return None


def current(ordinal: int) -> AbstractContextManager:
    """Context in which the device is current on this thread."""
    import torch

    return torch.cuda.device(ordinal)


def another(ordinal: int) -> Callable[[], bool] | None:
    """Function that returns True if another device is current on the thread; None if the process has no other."""
    import torch

    current, count = torch.cuda.current_device, torch.cuda.device_count()
    return None if count == 1 else lambda: current() != ordinal
