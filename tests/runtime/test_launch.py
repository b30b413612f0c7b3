"""Launches on a GPU: arguments, streams, threads, contexts, clusters, shared memory, errors."""

import threading
from dataclasses import dataclass, field, replace

import pytest
import torch

from graphfuse.base.errors import DeviceError
from graphfuse.contract.engine import Address, Constant, HostScalar, Launch, Scratch
from graphfuse.runtime import device, launch, nvrtc
from graphfuse.runtime.handle import current_stream
from support.launching import run, start

pytestmark = pytest.mark.gpu

SOURCE = r"""
extern "C" __global__ void record(long long* out, float scale, char* scratch, int i, long long l, float f, void* p) {
    if (threadIdx.x || blockIdx.x) return;
    out[0] = __float_as_int(scale);
    out[1] = (long long)scratch;
    out[2] = i;
    out[3] = l;
    out[4] = __float_as_int(f);
    out[5] = (long long)p;
    out[6] = gridDim.x;
    out[7] = blockDim.x;
}
extern "C" __global__ void fill(float* out, float value) {
    out[blockIdx.x * (long long)blockDim.x + threadIdx.x] = value;
}
extern "C" __global__ void nothing() {}
extern "C" __global__ void ranks(int* out) {
    unsigned rank, size;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) { out[2 * blockIdx.x] = rank; out[2 * blockIdx.x + 1] = size; }
}
extern "C" __global__ void shared(int* out, int last) {
    extern __shared__ int tile[];
    tile[last] = 7;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = tile[last];
}
extern "C" __global__ void spill(float* out, int n) {
    __shared__ float tile[64];
    float local[64];
    for (int i = 0; i < n; i++) local[i % 64] = out[i];
    tile[threadIdx.x % 64] = local[n % 64];
    __syncthreads();
    out[0] = tile[(n + 1) % 64];
}
"""


@dataclass
class At:
    """Buffers by tensor id."""

    addresses: dict = field(default_factory=dict)
    scalars: dict = field(default_factory=dict)

    def address(self, tensor):
        return self.addresses[tensor]

    def scalar(self, tensor):
        return self.scalars[tensor]


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return nvrtc.compile(SOURCE, device.get("cuda:0").arch, "launch")


@pytest.fixture
def kernel(cubin):
    return lambda entry, ordinal=0: launch.load(cubin, entry, device.get(ordinal))


def bits(value: float) -> int:
    return torch.tensor(value).view(torch.int32).item()


def test_every_kind_of_argument(kernel):
    out = torch.zeros(8, dtype=torch.int64, device="cuda:0")
    how = Launch(
        grid=3,
        block=64,
        arguments=(
            Address(5),
            HostScalar(6),
            Scratch(256),
            Constant("int32", -7),
            Constant("int64", -(1 << 40)),
            Constant("float32", 0.1),
            Constant("pointer", (1 << 63) + 1),
        ),
    )
    record = kernel("record")
    for scale in (1.5, -0.0, float("inf")):
        run(record, how, At({5: out.data_ptr()}, {6: scale}), 4096, 0)
        expected = [bits(scale), 4352, -7, -(1 << 40), bits(0.1), (1 << 63) + 1 - (1 << 64), 3, 64]
        assert out.tolist() == expected


FILL = Launch(grid=4, block=32, arguments=(Address(0), HostScalar(1)))


def test_one_kernel_serves_many_launches(kernel):
    fill = kernel("fill")
    for grid in range(100):  # more than are remembered
        out = torch.zeros(128, 32, device="cuda:0")
        run(fill, replace(FILL, grid=grid), At({0: out.data_ptr()}, {1: 2.0}), 0, 0)
        assert out.sum(1).count_nonzero().item() == grid


def test_a_kernel_without_arguments_and_a_grid_of_zero(kernel):
    run(kernel("nothing"), Launch(1, 1, ()), At(), 0, 0)
    # Nothing is launched, so not even the buffers are asked.
    run(kernel("fill"), replace(FILL, grid=0), At({0: 0}, {1: 0.0}), 0, 0)


def test_the_stream_is_used(kernel):
    fill, out = kernel("fill"), torch.zeros(128, device="cuda:0")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(fill, FILL, At({0: out.data_ptr()}, {1: 3.0}), 0, current_stream(fill.device))
    assert out.eq(0).all()  # recorded, not run
    graph.replay()
    assert out.eq(3).all()


def test_clusters(kernel):
    if device.get(0).sm < 90:
        pytest.skip("clusters need compute capability 9.0")
    ranks = kernel("ranks")
    for cluster in (1, 2, 8, 16):
        out = torch.full((32, 2), -1, dtype=torch.int32, device="cuda:0")
        run(ranks, Launch(32, 64, (Address(0),), cluster=cluster), At({0: out.data_ptr()}), 0, 0)
        assert out.tolist() == [[i % cluster, cluster] for i in range(32)]


def test_more_shared_memory_than_every_block_gets(kernel):
    shared, limit = kernel("shared"), device.get(0).shared_memory_per_block
    for nbytes in (limit, 1024, 64 << 10, limit):
        out = torch.zeros(2, dtype=torch.int32, device="cuda:0")
        how = Launch(2, 32, (Address(0), Constant("int32", nbytes // 4 - 1)), shared_bytes=nbytes)
        run(shared, how, At({0: out.data_ptr()}), 0, 0)
        assert out.tolist() == [7, 7]
    with pytest.raises(DeviceError, match=f"kernel 'shared' on cuda:0 .*{limit + 4} bytes of shared memory"):
        run(shared, replace(how, shared_bytes=limit + 4), At({0: out.data_ptr()}), 0, 0)


def test_attributes(kernel):
    plain, spill = kernel("fill").resources, kernel("spill").resources
    assert plain.registers > 0 and (plain.local_bytes, plain.shared_bytes) == (0, 0)
    assert (spill.local_bytes, spill.shared_bytes) == (256, 256)


def test_threads_on_their_own_streams(kernel):
    fill = kernel("fill")
    outs = torch.zeros(8, 50, 128, device="cuda:0")
    torch.cuda.synchronize()
    failures = []

    def work(n):
        try:
            stream = torch.cuda.Stream()
            for i in range(50):
                at = At({0: outs[n, i].data_ptr()}, {1: float(100 * n + i)})
                run(fill, FILL, at, 0, stream.cuda_stream)
            stream.synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    expected = (100 * torch.arange(8)[:, None] + torch.arange(50)).float()[..., None].expand(8, 50, 128)
    assert torch.equal(outs.cpu(), expected)


def test_a_thread_that_never_touched_cuda(kernel):
    from cuda.bindings import driver

    fill, out, seen = kernel("fill"), torch.zeros(128, device="cuda:0"), []
    torch.cuda.synchronize()

    def work():
        seen.append(int(driver.cuCtxGetCurrent()[1]))
        run(fill, FILL, At({0: out.data_ptr()}, {1: 4.0}), 0, 0)
        seen.append(int(driver.cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 0]
    torch.cuda.synchronize()
    assert out.eq(4).all()


def test_another_context_of_the_same_device_is_current(kernel):
    """Memory of one context is not the other's: the launch goes to the kernel's own, and leaves the current one be."""
    from cuda.bindings import driver

    fill, out = kernel("fill"), torch.zeros(128, device="cuda:0")
    launcher = fill.launcher(FILL)
    torch.cuda.synchronize()
    seen, failures = [], []

    def work():
        context = other_context(driver)
        try:
            seen.append(int(driver.cuCtxGetCurrent()[1]) == int(context))
            start(launcher, FILL, At({0: out.data_ptr()}, {1: 6.0}), 0, 0)
            seen.append(int(driver.cuCtxGetCurrent()[1]) == int(context))
        except Exception as error:
            failures.append(error)
        driver.cuCtxDestroy(context)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures and seen == [True, True]
    torch.cuda.synchronize()
    assert out.eq(6).all()


def other_context(driver):
    """A new context, current on this thread."""
    try:
        error, context = driver.cuCtxCreate(None, 0, 0)
    except TypeError:  # before cuda-bindings 13
        error, context = driver.cuCtxCreate(0, 0)
    device.check(error, "making a context")
    return context


def test_a_launcher_starts_again_and_again_on_any_thread(kernel):
    fill, outs = kernel("fill"), torch.zeros(8, 128, device="cuda:0")
    launcher = fill.launcher(FILL)
    buffers = [At({0: out.data_ptr()}, {1: n + 1.0}) for n, out in enumerate(outs)]
    torch.cuda.synchronize()
    for _ in range(3):
        outs.zero_()
        torch.cuda.synchronize()
        threads = [threading.Thread(target=start, args=(launcher, FILL, at)) for at in buffers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        torch.cuda.synchronize()
        assert outs.tolist() == [[n + 1.0] * 128 for n in range(8)]


def test_torchs_current_device_stays(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    fill = kernel("fill", 1)
    out = torch.zeros(128, device="cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        run(fill, FILL, At({0: out.data_ptr()}, {1: 5.0}), 0, 0)
        assert torch.cuda.current_device() == 0 and device.get().ordinal == 0
    assert out.eq(5).all()


def test_a_launch_the_driver_refuses_names_the_kernel(kernel):
    with pytest.raises(DeviceError, match="kernel 'fill' on cuda:0 with grid 4, block 2048.*CUDA_ERROR_INVALID"):
        run(kernel("fill"), replace(FILL, block=2048), At({0: 0}, {1: 0.0}), 0, 0)


def test_loading_what_is_not_there(cubin):
    with pytest.raises(DeviceError, match="loading kernel 'absent' on cuda:0"):
        launch.load(cubin, "absent", device.get(0))
    with pytest.raises(DeviceError, match="loading kernel 'fill' on cuda:0"):
        launch.load(b"\x7fELF nothing", "fill", device.get(0))


def test_a_cubin_of_another_architecture():
    other = "sm_80" if device.get(0).sm != 80 else "sm_90a"
    with pytest.raises(DeviceError, match="loading kernel 'nothing' on cuda:0"):
        launch.load(nvrtc.compile('extern "C" __global__ void nothing() {}', other, "n"), "nothing", device.get(0))
