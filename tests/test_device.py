"""The records of chips that planning may be done for without having one."""

import pytest

from graphfuse.device import ARCHES, CPU, for_arch


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


def test_the_cpu_and_unknown_ones():
    assert (str(CPU), CPU.sm) == ("cpu", 0)
    with pytest.raises(ValueError, match="sm_70.*known: sm_80"):
        for_arch("sm_70")
