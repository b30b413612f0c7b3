"""Checks of a graph's constructor arguments: the device to plan for, and the kernel cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from graphfuse.base.device import for_sm
from graphfuse.base.errors import GraphTypeError, GraphValidationError, SettingError

if TYPE_CHECKING:
    from graphfuse.planning.kernel_cache import KernelCache
    from graphfuse.runtime.device import Target


def target(where: str, sm_version: object, device_property: object) -> Target | None:
    """Device with this compute capability or these properties; None if neither is given.

    where: the graph that errors name. Raises SettingError for an unknown chip, GraphValidationError if both arguments
    contradict each other.
    """
    if sm_version is None and device_property is None:
        return None
    from graphfuse.runtime.device import Target
    from graphfuse.runtime.device_properties import DeviceProperties

    if sm_version is not None and (isinstance(sm_version, bool) or not isinstance(sm_version, int)):
        raise GraphTypeError(f"{where}: sm_version must be an int, as 90 for SM90, got {sm_version!r}")
    if device_property is None:
        try:
            return Target(for_sm(cast(int, sm_version)), exact=False)
        except SettingError as error:
            raise SettingError(f"{where}: sm_version is {sm_version}: {error}") from None
    if not isinstance(device_property, DeviceProperties):
        raise GraphTypeError(
            f"{where}: device_property must be what create_device_properties returns, got {device_property!r}"
        )
    device = device_property.device
    if sm_version not in (None, device.sm):
        raise GraphValidationError(f"{where}: sm_version is {sm_version}, and device_property is of SM{device.sm}")
    return Target(device, exact=True)


def checked_cache(where: str, cache: object) -> KernelCache | None:
    """The given kernel cache, which may be None. Raises GraphTypeError for anything else."""
    if cache is None:
        return None
    from graphfuse.planning.kernel_cache import KernelCache

    if not isinstance(cache, KernelCache):
        raise GraphTypeError(f"{where}: kernel_cache must be what create_kernel_cache returns, got {cache!r}")
    return cache
