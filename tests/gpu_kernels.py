"""Runs every small kernel variant on the GPU by the public API: the program that the sanitizers watch.

Memory comes from the driver, each tensor in an allocation of exactly its size, and the GPU
runs nothing but the kernels: packed outputs are memory that nobody wrote before. With
``--planted TOOL``, runs the kernel of planted.cu that TOOL must complain about instead.
"""

import argparse
import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphfuse.base.device import Device
from graphfuse.contract.engine import Address, Launch, knobs_to_dict
from graphfuse.runtime import device as devices


class Memory:
    """Allocations of one device, which must be current."""

    def __init__(self):
        from cuda.bindings import driver

        self._driver = driver
        self._addresses: list[int] = []

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` that nothing has written."""
        error, address = self._driver.cuMemAlloc(nbytes)
        devices.check(error, f"allocating {nbytes} bytes")
        self._addresses.append(int(address))
        return int(address)

    def put(self, address: int, host: int, nbytes: int) -> None:
        devices.check(self._driver.cuMemcpyHtoD(address, host, nbytes)[0], "copying to the device")

    def get(self, host: int, address: int, nbytes: int) -> None:
        """After all work before it."""
        devices.check(self._driver.cuMemcpyDtoH(host, address, nbytes)[0], "copying from the device")

    def free(self) -> None:
        for address in self._addresses:
            devices.check(self._driver.cuMemFree(address)[0], "freeing memory")
        self._addresses.clear()


@contextmanager
def memory_of(device: Device) -> Iterator[Memory]:
    with devices.current(device.ordinal):
        memory = Memory()
        yield memory
        memory.free()


def run_variant(variant, device: Device) -> int:
    """Every row count of the variant, results held against float64; the number of launches."""
    import torch

    counts = variant.row_counts(device)
    for rows in counts:
        problem = dataclasses.replace(variant.problem, rows=rows)
        graph = problem.graph(str(device))
        graph.validate()
        graph.build_operation_graph()
        knobs = knobs_to_dict(variant.knobs_on(device))
        graph.build_plan_at_index(graph.create_execution_plan(variant.engine.name, knobs))
        pack, outputs = problem.inputs(), problem.outputs()
        with memory_of(device) as memory:
            places = {}
            size = graph.get_workspace_size()
            workspace = memory.take(size) if size else None
            for name, tensor in (pack | outputs).items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = tensor.untyped_storage()
                places[name] = memory.take(storage.nbytes())
                # What lies between rows is written here: the copy back reads it.
                if name not in outputs or not tensor.is_contiguous() or tensor.storage_offset():
                    memory.put(places[name], storage.data_ptr(), storage.nbytes())
            graph.execute(
                {
                    name: places[name] + t.storage_offset() * t.element_size() if name in places else t
                    for name, t in (pack | outputs).items()
                },
                workspace,
            )
            for name, tensor in outputs.items():
                storage = tensor.untyped_storage()
                memory.get(storage.data_ptr(), places[name], storage.nbytes())
        variant.hold(rows, pack, outputs)
    return len(counts)


class _One:
    """The buffers of a launch with one tensor."""

    def __init__(self, address: int):
        self._address = address

    def address(self, tensor: int) -> int:
        return self._address

    def scalar(self, tensor: int) -> float:
        raise AssertionError("no scalars")


def run_planted(tool: str, device: Device) -> None:
    """The kernel of planted.cu that bears the tool's name."""
    from graphfuse.runtime import launch, nvrtc
    from support import launching

    source = Path(__file__).with_name("planted.cu").read_text()
    kernel = launch.load(nvrtc.compile(source, device.arch, "planted.cu"), tool, device)
    with memory_of(device) as memory:
        address = memory.take(64 * 4)
        launching.run(kernel, Launch(grid=1, block=64, arguments=(Address(0),)), _One(address))
        host = ctypes.create_string_buffer(64 * 4)
        memory.get(ctypes.addressof(host), address, 64 * 4)


def main() -> None:
    from support import sanitizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planted", choices=sanitizer.TOOLS, help="run the bug that this tool must find")
    planted = parser.parse_args().planted
    device = devices.get("cuda:0")
    if planted:
        run_planted(planted, device)
        return
    from support.variants import VARIANTS

    small = [v for v in VARIANTS.values() if v.small]
    launches = sum(run_variant(variant, device) for variant in small)
    print(f"{len(small)} variants, {launches} launches")


if __name__ == "__main__":
    main()
