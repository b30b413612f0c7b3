import threading

import pytest

from graphfuse.base.device import CPU, EMULATOR
from graphfuse.base.errors import DeviceError, SettingError
from graphfuse.runtime import device

pytestmark = pytest.mark.torch


def test_without_a_visible_device_the_cpu_is_what_there_is(python):
    code = """
from graphfuse.base.errors import DeviceError
from graphfuse.runtime import device
print(device.count(), device.get(), device.pointer_device(4096))
for spec in ("cuda", "cuda:7", 0):
    try:
        device.get(spec)
    except DeviceError as error:
        print(error)
"""
    lines = python(code, CUDA_VISIBLE_DEVICES="").splitlines()
    assert lines[0] == "0 cpu None"
    assert len(lines) == 4 and all("no CUDA device" in line and "accepted: cpu" in line for line in lines[1:])


def test_the_cpu_needs_no_driver():
    assert device.get("cpu") is CPU
    assert device.get("emulator") is EMULATOR


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "cpu")
    assert device.get() is CPU


@pytest.mark.parametrize("spec", ["gpu", "cuda:", "cuda:-1", -1, 1.5, True, ""])
def test_another_spelling_is_a_value_error(spec):
    with pytest.raises(SettingError, match="is not a device; accepted: cpu, cuda, cuda:N"):
        device.get(spec)


@pytest.mark.gpu
def test_the_record_agrees_with_torch():
    import torch

    found = device.get("cuda:0")
    theirs = torch.cuda.get_device_properties(0)
    assert device.count() == torch.cuda.device_count()
    assert found.name == theirs.name
    assert found.compute_capability == (theirs.major, theirs.minor)
    assert found.sm_count == theirs.multi_processor_count
    assert found.threads_per_sm == theirs.max_threads_per_multi_processor
    assert found.registers_per_sm == theirs.regs_per_multiprocessor
    assert found.l2_bytes == theirs.L2_cache_size
    assert found.shared_memory_per_block == theirs.shared_memory_per_block_optin
    assert found.shared_memory_per_sm == theirs.shared_memory_per_multiprocessor
    assert found.memory_bytes == theirs.total_memory
    assert device.get(0) is found and device.get(torch.device("cuda:0")) is found and device.get("cuda") is found


@pytest.mark.gpu
def test_a_device_that_is_not_there():
    last = device.count() - 1
    with pytest.raises(DeviceError, match=f"'cuda:99' is not there; accepted: cpu, cuda:0 to cuda:{last}"):
        device.get("cuda:99")


@pytest.mark.gpu
def test_what_torch_made_current_is_current():
    import torch

    for ordinal in range(torch.cuda.device_count()):
        with torch.cuda.device(ordinal):
            torch.empty(1, device="cuda")
            assert device.get().ordinal == ordinal
            assert device.get("cuda").ordinal == ordinal


@pytest.mark.gpu
def test_a_thread_without_a_context_gets_the_first_device():
    found = []
    thread = threading.Thread(target=lambda: found.append(device.get()))
    thread.start()
    thread.join()
    assert found == [device.get(0)]


@pytest.mark.gpu
def test_current_restores_what_was_current():
    import torch

    last = device.count() - 1
    torch.cuda.set_device(0)
    torch.empty(1, device="cuda")
    with device.current(last):
        assert device.get().ordinal == last
    assert device.get().ordinal == 0 and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_device_memory_is_known_and_host_memory_is_not():
    import torch

    assert device.pointer_device(torch.empty(8, device="cuda:0").data_ptr()) == "cuda:0"
    assert device.pointer_device(torch.empty(8).data_ptr()) is None


@pytest.mark.gpu
def test_a_driver_error_is_named():
    from cuda.bindings import driver

    device.check(driver.CUresult.CUDA_SUCCESS, "loading")
    with pytest.raises(DeviceError, match=r"loading: CUDA_ERROR_INVALID_VALUE \(invalid argument\)"):
        device.check(driver.CUresult.CUDA_ERROR_INVALID_VALUE, "loading")
