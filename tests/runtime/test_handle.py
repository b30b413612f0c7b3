import pytest

from graphfuse.base.device import CPU
from graphfuse.base.errors import DeviceError, GraphStateError
from graphfuse.runtime.handle import create_handle, current_stream, destroy_handle, get_stream, set_stream


class Protocol:
    def __cuda_stream__(self):
        return (0, 77)


class Property:
    __cuda_stream__ = (0, 78)


class LikeTorch:
    cuda_stream = 79


@pytest.mark.parametrize("stream, address", [(0, 0), (5, 5), (Protocol(), 77), (Property(), 78), (LikeTorch(), 79)])
def test_streams_of_every_form(stream, address):
    handle = create_handle("cpu")
    assert get_stream(handle) == 0
    set_stream(handle=handle, stream=stream)
    assert get_stream(handle=handle) == handle.stream == address


@pytest.mark.parametrize("stream", ["0", None, 1.0, object()])
def test_what_is_no_stream(stream):
    handle = create_handle("cpu")
    set_stream(handle, 5)
    with pytest.raises(TypeError, match="is not a stream; accepted: an address"):
        set_stream(handle, stream)
    assert get_stream(handle) == 5


def test_a_destroyed_handle_is_of_no_use():
    handle = create_handle("cpu")
    assert handle.device is CPU
    destroy_handle(handle)
    for use in (destroy_handle, get_stream, lambda h: set_stream(h, 0), lambda h: h.device, lambda h: h.stream):
        with pytest.raises(GraphStateError, match="used after destroy_handle"):
            use(handle)
    assert "destroyed" in repr(handle)


def test_what_is_no_handle():
    with pytest.raises(TypeError, match="accepted: what create_handle returns"):
        get_stream(0)


def test_a_handle_without_a_device_is_for_the_current_one(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "cpu")
    assert create_handle().device is CPU


def test_the_cpu_has_no_stream():
    assert current_stream(CPU) == 0


@pytest.mark.gpu
def test_torch_streams():
    import torch

    handle = create_handle()
    stream = torch.cuda.Stream()
    set_stream(handle, stream)
    assert get_stream(handle) == stream.cuda_stream != 0
    assert current_stream(handle.device) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(stream):
        assert current_stream(handle.device) == stream.cuda_stream
    set_stream(handle, torch.cuda.current_stream().cuda_stream)
    assert get_stream(handle) == 0


@pytest.mark.gpu
def test_a_stream_of_another_device():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    with pytest.raises(DeviceError, match="is one of cuda:1; accepted: streams of cuda:0"):
        set_stream(create_handle("cuda:0"), torch.cuda.Stream("cuda:1"))


@pytest.mark.gpu
def test_before_torch_uses_cuda_the_stream_is_the_default(python):
    code = """
import torch
from graphfuse.runtime import device, handle
print(handle.current_stream(device.get(0)), torch.cuda.is_initialized())
"""
    assert python(code) == "0 False"
