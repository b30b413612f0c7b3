"""A small kernel for each header: exact results on the emulator and on a GPU, cubins for every chip that has it."""

import numpy as np
import pytest

from graphfuse.base.device import ARCHES, for_arch
from graphfuse.emulator.compiler import Build
from support import emulation, launching
from support.small_kernels import CASES


def assert_exact(case, found) -> None:
    for number, expected in case.expected(case.arrays).items():
        np.testing.assert_array_equal(found[number], expected)


def arrays_of(case, contents: dict[int, bytes]) -> dict[int, np.ndarray]:
    return {n: np.frombuffer(contents[n], a.dtype).reshape(a.shape) for n, a in case.arrays.items()}


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE])
@pytest.mark.parametrize("name", CASES)
def test_under_sanitizers(name, build):
    case = CASES[name]
    found = emulation.checked(case.source(), case.kernel, case.launch, case.arrays, builds=[build])
    assert_exact(case, arrays_of(case, found))


@pytest.mark.emulate
@pytest.mark.parametrize("schedule", range(8))
@pytest.mark.parametrize("name", CASES)
def test_in_this_process(name, schedule):
    case = CASES[name]
    arrays = {n: a.copy() for n, a in case.arrays.items()}
    emulation.run(case.source(), case.kernel, case.launch, arrays, schedule=schedule)
    assert_exact(case, arrays)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [*ARCHES, "sm_120a"])
@pytest.mark.parametrize("name", CASES)
def test_compiles_for(name, arch):
    from graphfuse.runtime import nvrtc

    case = CASES[name]
    if for_arch(arch.replace("120a", "120")).sm >= case.sm:
        assert nvrtc.compile(case.source(), arch, f"{name}.cu")
    else:
        from graphfuse.base.errors import KernelCompileError

        with pytest.raises(KernelCompileError):
            nvrtc.compile(case.source(), arch, f"{name}.cu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    import torch

    from graphfuse.runtime import cache, device, launch

    case, chip = CASES[name], device.get("cuda:0")
    if chip.sm < case.sm:
        pytest.skip(f"needs compute capability {case.sm / 10}")
    cubin = cache.cubin(case.source(), chip.arch, f"{name}.cu")
    on_device = {n: torch.from_numpy(a.view(np.uint8).copy()).cuda() for n, a in case.arrays.items()}

    class Buffers:
        def address(self, tensor):
            return on_device[tensor].data_ptr()

    torch.cuda.synchronize()
    launching.run(launch.load(cubin, case.kernel, chip), case.launch, Buffers())
    torch.cuda.synchronize()
    assert_exact(case, arrays_of(case, {n: t.cpu().numpy().tobytes() for n, t in on_device.items()}))
