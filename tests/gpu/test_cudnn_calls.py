"""Calls of cuDNN's engine on a GPU: threads, streams, capture, devices.

Skipped where nvidia-cudnn-frontend or libcudnn is missing.
"""

import threading

import pytest
import torch

import graphfuse
from graphfuse import GraphNotSupportedError
from support import graphs
from support.on_cudnn import dense, hold, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cudnn")]


def test_threads_on_streams_of_their_own():
    case, _ = dense()
    run(case)
    work = [dense(seed=10 * n)[0].pack for n in range(4)]
    wanted, size, failures = [], case.g.get_workspace_size(), []
    for pack in work:
        case.g.execute(pack, graphs.workspace(size, "cuda") if size else None)
        wanted.append(pack["out"].clone())
    torch.cuda.synchronize()
    barrier = threading.Barrier(len(work))

    def thread(number: int) -> None:
        try:
            stream, pack = torch.cuda.Stream(), work[number]
            space = graphs.workspace(size, "cuda") if size else None
            barrier.wait()
            with torch.cuda.stream(stream):
                for _ in range(100):
                    pack["out"].zero_()
                    case.g.execute(pack, space)
            stream.synchronize()
            if not torch.equal(pack["out"], wanted[number]):
                failures.append(f"thread {number}: wrong result")
        except Exception as error:
            failures.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(len(work))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_work_is_on_the_callers_stream():
    """The input is filled late, on the stream: work anywhere else would read the old one."""
    case, (name, exact) = dense()
    space = run(case)
    late, stream = case.pack["a"].clone(), torch.cuda.Stream()
    handle = graphfuse.create_handle("cuda:0")
    graphfuse.set_stream(handle, stream)
    case.pack["a"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.pack["a"].copy_(late)
    case.g.execute(case.pack, space, handle)
    stream.synchronize()
    hold(case, (name, exact))


def test_it_is_captured_and_allocates_nothing():
    case, (name, exact) = dense()
    space = run(case)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.g.execute(case.pack, space)
    stream.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        case.g.execute(case.pack, space)
    for _ in range(3):
        case.pack[name].fill_(float("nan"))
        recorded.replay()
        torch.cuda.synchronize()
        hold(case, (name, exact))

    def taken() -> int:
        """Bytes of the device that many calls take; other processes' among them."""
        before = torch.cuda.mem_get_info()[0]
        for _ in range(50):
            case.g.execute(case.pack, space)
        torch.cuda.synchronize()
        return before - torch.cuda.mem_get_info()[0]

    assert any(taken() <= 0 for _ in range(20))  # what calls take is taken each time, what others do is not


def test_dependent_launch_is_refused():
    case, _ = dense()
    space = run(case)
    with pytest.raises(GraphNotSupportedError, match="cuDNN does not say that its kernels wait"):
        case.g.execute(case.pack, space, programmatic_dependent_launch=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device_is_left_current():
    case, want = dense()
    space = run(case)
    case.pack["out"].fill_(float("nan"))
    with torch.cuda.device(1):
        case.g.execute(case.pack, space, graphfuse.create_handle("cuda:0"))
        assert torch.cuda.current_device() == 1
    torch.cuda.synchronize()
    hold(case, want)
