"""Device properties, in memory and as JSON, for planning on a machine that does not have the device.

The JSON has those fields of ``base.device.Device`` that describe the chip. cuDNN's text of device properties has other
fields and cannot be read.
"""

import dataclasses
from dataclasses import dataclass

from graphfuse.base.device import Device, for_arch
from graphfuse.base.errors import GraphTypeError
from graphfuse.files import json_values
from graphfuse.runtime import device as devices

_SIZES = (*devices.FIGURES, "memory_bytes")
_WHERE = "the device properties"


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a CUDA device, which may be absent on this machine. ``create_device_properties`` makes them."""

    device: Device

    def serialize(self) -> str:
        """JSON text for ``create_device_properties``."""
        sizes = {name: getattr(self.device, name) for name in _SIZES}
        capability = list(self.device.compute_capability)
        return json_values.text({"name": self.device.name, "compute_capability": capability, **sizes})


def create_device_properties(device: int | str = 0) -> DeviceProperties:
    """Properties of a device to plan for, for ``pygraph(device_property=...)``.

    device: the number of a CUDA device of this machine, the name of an architecture (``"sm_100a"``, with its published
    properties), or a text that ``serialize`` returned on another machine. Raises DeviceError for a device that is not
    there, SettingError for an unknown architecture, SerializedError for any other text.
    """
    if isinstance(device, str):
        found = _read(device) if device.lstrip().startswith("{") else for_arch(device)
    elif isinstance(device, int) and not isinstance(device, bool):
        found = devices.get(device)
    else:
        raise GraphTypeError(
            f"create_device_properties: device must be the number of a device, the name of an architecture or a "
            f"serialized text, got {device!r}"
        )
    return DeviceProperties(dataclasses.replace(found, ordinal=0, here=False))


def _read(text: str) -> Device:
    data = json_values.parse(_WHERE, text)
    name = json_values.field(_WHERE, data, "name", str)
    capability = json_values.integers(_WHERE, data, "compute_capability")
    if len(capability) != 2 or capability[0] < 1 or not 0 <= capability[1] <= 9:
        json_values.refuse(f"{_WHERE}: compute_capability", list(capability), "two numbers, as [9, 0]")
    sizes = {size: json_values.field(_WHERE, data, size, int) for size in _SIZES}
    json_values.known(_WHERE, tuple(data), ("name", "compute_capability", *_SIZES))
    for size, value in sizes.items():
        if value < 1:
            json_values.refuse(f"{_WHERE}: {size}", value, "a number above 0")
    return Device("cuda", 0, name, (capability[0], capability[1]), **sizes)
