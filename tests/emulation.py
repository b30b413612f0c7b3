"""Kernels on numpy arrays: in this process, or under sanitizers in all schedules."""

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from graphfuse.emulator import kernel
from graphfuse.emulator.check import Memory, check
from graphfuse.emulator.compiler import Build
from graphfuse.engine import Launch


class Varies(AssertionError):
    """Schedules or builds of one kernel gave different results."""


class Arrays:
    """Arrays by tensor id, as ``engine.Buffers``."""

    def __init__(self, arrays: Mapping[int, np.ndarray], scalars: Mapping[int, float]):
        self._arrays, self._scalars = arrays, scalars

    def address(self, tensor: int) -> int:
        return self._arrays[tensor].ctypes.data

    def scalar(self, tensor: int) -> float:
        return self._scalars[tensor]


def run(source: str, entry: str, launch: Launch, arrays: Mapping[int, np.ndarray], scalars=(), schedule=0) -> None:
    """In this process; the arrays are changed."""
    kernel.load(source, entry).run(launch, Arrays(arrays, dict(scalars)), 0, schedule=schedule)


def extent(array: np.ndarray) -> tuple[int, int]:
    """Address of the first byte, and number of bytes to the end of the last element."""
    if not array.size:
        return array.ctypes.data, 0
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def checked(
    source: str,
    entry: str,
    launch: Launch,
    arrays: Mapping[int, np.ndarray],
    scalars=(),
    builds: Sequence[Build] = (Build.ADDRESS, Build.RACE),
) -> dict[int, bytes]:
    """Under each kind of sanitizers, in all schedules: the bytes of each array's extent afterwards,
    which all of them agree on. The arrays stay as they are."""
    memory = {t: Memory(extent(a)[0], ctypes.string_at(*extent(a))) for t, a in arrays.items()}
    results = [r for build in builds for r in check(source, entry, launch, memory, dict(scalars), build)]
    for tensor in arrays:
        if len({result[tensor] for result in results}) > 1:
            raise Varies(f"argument {tensor} of {entry!r} depends on the schedule")
    return results[0]
