"""The device that cuDNN works on: the current one of the thread, as the CUDA runtime sees it."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from graphfuse.base.device import Device
from graphfuse.contract.engine import No


def why_not(device: Device) -> No | None:
    """Why cuDNN cannot plan for a device: it asks the device itself, so that one by name alone will not do."""
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
    """Makes the device current on this thread for a while."""
    import torch

    return torch.cuda.device(ordinal)


def another(ordinal: int) -> Callable[[], bool] | None:
    """Tells whether another device than this one is current on a thread; None where the process sees no other."""
    import torch

    current, count = torch.cuda.current_device, torch.cuda.device_count()
    return None if count == 1 else lambda: current() != ordinal
