"""The records of chips that planning may be done for without having one."""

import dataclasses

import pytest

from graphfuse.base.device import ARCHES, CPU, EMULATOR, for_arch
from graphfuse.base.errors import SettingError


@pytest.mark.parametrize("arch", ARCHES)
def test_every_architecture(arch):
    device = for_arch(arch)
    assert device.kind == "cuda" and str(device) == "cuda:0"
    assert device.arch in (arch, f"{arch}a") and device.sm == int(arch[3:].rstrip("a"))
    sizes = (
        "sm_count",
        "threads_per_sm",
        "registers_per_sm",
        "shared_memory_per_block",
        "shared_memory_per_sm",
        "l2_bytes",
    )
    assert all(getattr(device, size) > 0 for size in sizes)
    assert device.shared_memory_per_block < device.shared_memory_per_sm


def test_where_kernels_run_and_memory_is():
    chip = for_arch("sm_90a")
    assert (chip.runs_kernels, chip.memory) == (True, "cuda:0")
    assert (CPU.runs_kernels, CPU.memory) == (False, "cpu")
    assert (EMULATOR.runs_kernels, EMULATOR.memory, str(EMULATOR)) == (True, "cpu", "emulator")
    described = {"kind": "cuda", "name": chip.name, "memory_bytes": chip.memory_bytes, "here": False}
    assert dataclasses.replace(EMULATOR, **described) == chip


def test_the_cpu_and_unknown_ones():
    assert (str(CPU), CPU.sm) == ("cpu", 0)
    with pytest.raises(SettingError, match="sm_70.*known: sm_80"):
        for_arch("sm_70")
