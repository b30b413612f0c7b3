"""Where torch puts work at the moment."""

from collections.abc import Callable

from graphfuse.base.device import Device


def current(torch, device: Device) -> Callable[[int], bool]:
    """Tells whether torch's work goes to a stream of a device as it is, given the stream's address."""
    if device.memory == "cpu":
        return lambda stream: True
    torch.cuda.init()
    ordinal, chosen = device.ordinal, torch.cuda.current_device
    # The public way makes an object of the stream first, which takes longer than all else here.
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if address is None:
        address = lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream  # noqa: E731
    if torch.cuda.device_count() == 1:
        return lambda stream: address(ordinal) == stream
    return lambda stream: chosen() == ordinal and address(ordinal) == stream
