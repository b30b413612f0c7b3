"""Kernels on numpy arrays, and graphs that one kernel runs: in this process, or under sanitizers in all schedules."""

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from graphfuse import heur_mode, pygraph
from graphfuse.contract.engine import Launch, knobs_to_dict
from graphfuse.emulator import kernel
from graphfuse.emulator.check import Memory, check
from graphfuse.emulator.compiler import Build
from support import graphs, launching


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
    launching.run(kernel.load(source, entry), launch, Arrays(arrays, dict(scalars)), schedule=schedule)


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


class Planned:
    """A graph made for the emulator that one generated kernel runs, with all that execute is given, by name.

    knobs: the engine's; None for what is proposed first.
    """

    def __init__(self, graph: pygraph, pack: Mapping[str, object], knobs: object = None, engine: str = "rows"):
        graph.validate()
        graph.build_operation_graph()
        if knobs is None:
            graph.create_execution_plans([heur_mode.OPENSOURCE])
        self._index = 0 if knobs is None else graph.create_execution_plan(engine, knobs_to_dict(knobs))
        plan = graph._planner.at(self._index)
        (self.part,) = plan.parts
        assert plan.workspace_bytes == self.part.outline.scratch_bytes
        self.graph, self.pack = graph, dict(pack)
        self._bound = {t.name: t.id for t in graph._planner.graph.bound}

    @property
    def source(self) -> str:
        return self.part.engine.source(self.part.facts, self.part.knobs)

    def run(self) -> None:
        """Through the public API, in this process."""
        self.graph.build_plan_at_index(self._index)
        self.graph.execute(self.pack, graphs.workspace(self.part.outline.scratch_bytes))

    def check(self, build: Build, source: str | None = None) -> dict[str, bytes]:
        """What ``checked`` finds, by name. source: another kernel for the same launch."""
        entry, launch = self.part.engine.entry, self.part.outline
        scalars = {t.id: t.value for t in self.graph._planner.graph.tensors if t.value is not None}
        scalars |= {self._bound[n]: v for n, v in self.pack.items() if not isinstance(v, torch.Tensor)}
        arrays = {self._bound[name]: array for name, array in self._arrays().items()}
        found = checked(source or self.source, entry, launch, arrays, scalars, [build])
        return {name: found[self._bound[name]] for name in self._arrays()}

    def contents(self) -> dict[str, bytes]:
        """What lies in the tensors now, gaps between their rows included."""
        return {name: ctypes.string_at(*extent(array)) for name, array in self._arrays().items()}

    def keep(self, found: Mapping[str, bytes]) -> None:
        """Write what `check` found into the tensors."""
        for name, array in self._arrays().items():
            address, size = extent(array)
            assert len(found[name]) == size
            ctypes.memmove(address, found[name], size)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: _bytes(t) for name, t in self.pack.items() if isinstance(t, torch.Tensor)}


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes from the first element of a tensor to the end of its last."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    span = 1 + sum((e - 1) * s for e, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()
