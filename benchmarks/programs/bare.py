"""The kernel of a plan, started by nobody's code but the driver's: what every call of the host is measured against."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.contract import engine
from graphfuse.runtime import cache
from graphfuse.runtime.device import check

_TYPES = {
    "pointer": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


@dataclass(frozen=True)
class Started:
    """A kernel and how it is started. arguments: for each variant pack, in the order of its parameters."""

    cubin: bytes
    entry: str
    grid: int
    block: int
    shared_bytes: int
    arguments: Sequence[tuple[object, ...]]


def started(graph, packs: Sequence[Mapping[str, object]]) -> Started:
    """The only kernel of a built graph, in its first plan. packs: torch tensors by name.

    It takes a plain launch: no cluster, no scratch memory, nothing that is cleared before.
    """
    plan = graph._plan(0)
    (part,) = plan.parts
    launch, tensors = part.outline, part.region.subgraph.graph.tensors
    if launch.cluster != 1 or launch.cooperative or launch.cleared or launch.scratch_bytes:
        raise NotImplementedError(f"a bare start of {launch}")

    def value(argument: engine.Argument, pack: Mapping[str, object]) -> object:
        match argument:
            case engine.Constant(ctype, number):
                return _TYPES[ctype](number)
            case engine.HostScalar(tensor):
                return ctypes.c_float(tensors[tensor].value)
            case engine.Address(tensor):
                return ctypes.c_void_p(pack[tensors[tensor].name].data_ptr())
            case engine.RowCount():
                return ctypes.c_int64(launch.by_rows.rows)
        raise NotImplementedError(f"a bare start with {argument}")

    source = part.engine.source(part.facts, part.knobs)
    return Started(
        cache.cubin(source, plan.device.arch, f"{part.engine.name}.cu"),
        part.engine.entry,
        launch.grid,
        launch.block,
        launch.shared_bytes,
        [tuple(value(argument, pack) for argument in launch.arguments) for pack in packs],
    )


def bare(kernel: Started, stream: int) -> tuple[Callable[[int], object], list[int]]:
    """cuLaunchKernel on packed arguments, and where they are for each pack."""
    from cuda.bindings import driver

    error, module = driver.cuModuleLoadData(kernel.cubin)
    check(error, "loading the kernel")
    error, function = driver.cuModuleGetFunction(module, kernel.entry.encode())
    check(error, f"finding kernel {kernel.entry!r}")
    on = driver.CUstream(stream)
    tables = [(ctypes.c_void_p * len(each))(*map(ctypes.addressof, each)) for each in kernel.arguments]

    def launch(arguments: int):
        return driver.cuLaunchKernel(
            function, kernel.grid, 1, 1, kernel.block, 1, 1, kernel.shared_bytes, on, arguments, 0
        )

    launch.keep = tables, kernel
    return launch, [ctypes.addressof(table) for table in tables]


def cuda_core(kernel: Started) -> tuple[Callable[..., object], list[tuple[object, ...]]]:
    """cuda.core.launch on the numbers themselves, and those for each pack."""
    import cuda.core

    device = cuda.core.Device()
    device.set_current()
    code = cuda.core.ObjectCode.from_cubin(kernel.cubin, name=kernel.entry).get_kernel(kernel.entry)
    config = cuda.core.LaunchConfig(grid=kernel.grid, block=kernel.block, shmem_size=kernel.shared_bytes)
    stream = device.default_stream

    def launch(*arguments):
        cuda.core.launch(stream, config, code, *arguments)

    return launch, [tuple(a.value if isinstance(a, ctypes.c_void_p) else a for a in each) for each in kernel.arguments]
