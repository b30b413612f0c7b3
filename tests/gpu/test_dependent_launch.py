"""Programmatic dependent launch: kernels overlap the one before them and still see all that it writes."""

import threading

import pytest
import torch

import graphfuse
from graphfuse.codegen.render import render
from graphfuse.contract.engine import Address, Constant, Launch
from graphfuse.runtime import device, launch, nvrtc, timing
from graphfuse.runtime.handle import current_stream
from support import graphs
from support.graphs import BF16, Norm
from support.launching import prepared

pytestmark = pytest.mark.gpu

CASE = Norm(999, 320)
LATE_NS = 100_000

# `produce` lets the next kernel begin at once and writes late, from one CTA: the rest of the GPU is free.
# `peek` is what a consumer without the wait would be, `waiting` one with it; both tell when they began.
SOURCE = r"""
#include "graphfuse/dependent_launch.cuh"
#include "graphfuse/platform.cuh"

#include "generated.cuh"

__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
extern "C" __global__ void produce(const int* x, int* to_x, const int* weight, int* to_weight, long long* ended,
                                   int x_words, int weight_words, long long late) {
  gf::wait_for_previous_kernel();
  gf::let_next_kernel_begin();
  const unsigned long long start = now();
  while (now() - start < (unsigned long long)late) {
  }
  for (int i = threadIdx.x; i < x_words; i += blockDim.x) to_x[i] = x[i];
  for (int i = threadIdx.x; i < weight_words; i += blockDim.x) to_weight[i] = weight[i];
  __syncthreads();
  if (threadIdx.x == 0) *ended = now();
}
extern "C" __global__ void peek(const volatile int* x, long long* began, long long* seen) {
  *began = now();
  *seen = x[0];
}
extern "C" __global__ void waiting(const volatile int* x, long long* began, long long* seen) {
  const long long time = now();
  gf::wait_for_previous_kernel();
  *began = time;
  *seen = x[0];
}
"""


class At:
    """Buffers by tensor id."""

    def __init__(self, *tensors):
        self._tensors = tensors

    def address(self, tensor):
        return self._tensors[tensor].data_ptr()

    def scalar(self, tensor):
        raise AssertionError("no scalars")


@pytest.fixture(scope="module")
def kernel():
    here = device.get("cuda:0")
    if here.sm < 90:
        pytest.skip("needs compute capability 9.0")
    cubin = nvrtc.compile(render(SOURCE, "", "dependent.cu"), here.arch, "dependent.cu")
    return lambda entry: launch.load(cubin, entry, here)


class Producer:
    """Writes an input of CASE late, on torch's current stream. ended: when it did, in globaltimer's ns."""

    def __init__(self, kernel, inputs: dict, target: dict):
        self.ended = torch.zeros(1, dtype=torch.int64, device="cuda")
        words = [target[name].numel() // 2 for name in ("x", "weight")]
        how = Launch(
            1,
            1024,
            (*map(Address, range(5)), *(Constant("int32", n) for n in words), Constant("int64", LATE_NS)),
        )
        # Kept: what starts a kernel has addresses alone.
        self._at = At(inputs["x"], target["x"], inputs["weight"], target["weight"], self.ended)
        self._start = prepared(kernel("produce").launcher(how), how, self._at)

    def __call__(self):
        self._start(current_stream(device.get("cuda:0")))


def tell(kernel, entry: str, x: torch.Tensor, producer: Producer, dependent: bool) -> tuple[bool, int]:
    """Start the producer, then `peek` or `waiting`: whether that began before the producer ended, and what it saw."""
    began, seen = (torch.full((1,), -1, dtype=torch.int64, device="cuda") for _ in range(2))
    how = Launch(1, 1, (Address(0), Address(1), Address(2)))
    stream = current_stream(device.get("cuda:0"))
    start = prepared(kernel(entry).launcher(how, dependent), how, At(x, began, seen))
    torch.cuda.synchronize()
    producer()
    start(stream)
    torch.cuda.synchronize()
    return began.item() < producer.ended.item(), seen.item()


@pytest.fixture
def work(kernel):
    """(two inputs with results, target, producers of both into it)."""
    inputs = [CASE.inputs("cuda", seed) for seed in (1, 2)]
    wanted = []
    for pack in inputs:
        outputs = CASE.outputs("cuda")
        graphs.fused(CASE).execute(pack | outputs)
        wanted.append(outputs["out"])
    assert not torch.equal(*wanted)
    target = {name: torch.zeros_like(inputs[0][name]) for name in ("x", "weight")}
    producers = [Producer(kernel, pack, target) for pack in inputs]
    torch.cuda.synchronize()
    return wanted, target, producers


def first(x: torch.Tensor) -> int:
    return x.view(torch.int32).flatten()[0].item()


@pytest.mark.parametrize("dependent", [False, True])
def test_the_producer_can_be_overlapped(kernel, work, dependent):
    """What the other tests rest on: without the wait a kernel begins early and reads what was there before."""
    _, target, producers = work
    overlapped = 0
    for turn in range(20):
        target["x"].fill_(-1)
        before = first(target["x"])
        early, seen = tell(kernel, "peek", target["x"], producers[turn % 2], dependent)
        # One that began early may have looked late, where other processes share the GPU.
        assert before != first(target["x"]) and (seen == first(target["x"]) or (early and seen == before))
        overlapped += seen == before
    assert overlapped >= 10 if dependent else overlapped == 0


def test_a_kernel_that_waits_begins_early_and_sees_what_was_written(kernel, work):
    _, target, producers = work
    overlapped = 0
    for turn in range(20):
        target["x"].fill_(-1)
        early, seen = tell(kernel, "waiting", target["x"], producers[turn % 2], True)
        assert seen == first(target["x"])
        overlapped += early
    assert overlapped >= 15


@pytest.mark.parametrize("how", ["execute", "bind"])
def test_a_slow_producer_is_waited_for(work, how):
    """1,000 runs, the input and the weight another each time, the results compared bit by bit."""
    wanted, target, producers = work
    graph = graphs.fused(CASE)
    outs = [torch.zeros_like(wanted[0]) for _ in range(50)]
    packs = [target | {"out": out} for out in outs]
    if how == "bind":
        runs = [graph.bind(pack, programmatic_dependent_launch=True) for pack in packs]
    else:
        runs = [lambda pack=pack: graph.execute(pack, programmatic_dependent_launch=True) for pack in packs]
    for _ in range(20):
        for out in outs:
            out.zero_()
        for turn, run in enumerate(runs):
            producers[turn % 2]()
            run()
        torch.cuda.synchronize()
        for turn, out in enumerate(outs):
            assert torch.equal(out, wanted[turn % 2])


def test_nothing_is_written_before_the_kernel_before_is_over(work):
    """Each kernel writes what the one before reads: our output is the producer's target."""
    wanted, target, producers = work
    in_place = graphs.fused(CASE)
    results = [torch.zeros_like(wanted[0]) for _ in range(200)]
    for turn, result in enumerate(results):
        producers[turn % 2]()
        in_place.execute(target | {"out": target["x"]}, programmatic_dependent_launch=True)
        result.copy_(target["x"])
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert torch.equal(result, wanted[turn % 2])


def test_a_chain_of_dependent_launches(work):
    """Each takes the output of the one before, all but the first begin early."""
    case = Norm(4096, 512, BF16, BF16, BF16)
    graph, pack = graphs.fused(case), case.inputs("cuda")

    def chain(dependent: bool) -> torch.Tensor:
        x, other = pack["x"].clone(), torch.zeros_like(pack["x"])
        for _ in range(30):
            graph.execute(pack | {"x": x, "out": other}, programmatic_dependent_launch=dependent)
            x, other = other, x
        return x

    want = chain(False)
    for _ in range(50):
        assert torch.equal(chain(True), want)


def test_captured(work):
    """In a CUDA graph the launch becomes a programmatic edge."""
    wanted, target, producers = work
    outs = [torch.zeros_like(wanted[0]) for _ in range(2)]
    graph = graphs.fused(CASE)
    for out in outs:
        graph.execute(target | {"out": out}, programmatic_dependent_launch=True)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for producer, out in zip(producers, outs, strict=True):
            producer()
            graph.execute(target | {"out": out}, programmatic_dependent_launch=True)
    for _ in range(50):
        for out in outs:
            out.zero_()
        recorded.replay()
        torch.cuda.synchronize()
        assert torch.equal(outs[0], wanted[0]) and torch.equal(outs[1], wanted[1])


def norm_then_maximum() -> tuple[graphfuse.pygraph, dict[str, torch.Tensor]]:
    """A graph whose plan has two kernels, of which the second reads what the first writes, and its buffers."""
    graph = graphfuse.pygraph(io_data_type=BF16, intermediate_data_type=graphfuse.data_type.FLOAT)
    phase = graphfuse.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(graph.tensor([8, 64, 512], name="x"), None, 1e-5, norm_forward_phase=phase)
    y.set_data_type(BF16)
    largest = graph.reduction(y, mode=graphfuse.reduction_mode.MAX).set_dim([8, 1, 512])
    largest.set_output().set_data_type(BF16).set_name("out")
    graph.build([graphfuse.heur_mode.A])
    assert graph.get_plan_name_at_index(0).count("rows") == 2
    x = torch.randn(8, 64, 512, dtype=torch.bfloat16, device="cuda")
    return graph, {"x": x, "out": torch.empty(8, 1, 512, dtype=torch.bfloat16, device="cuda")}


def test_kernels_of_one_plan_overlap():
    """The second begins early, though the caller does not ask for it."""
    if device.get("cuda:0").sm != 90 or device.driver_version() < 12030:
        pytest.skip("is for compute capability 9.0, and drivers that capture it")
    one, pack = graphs.fused(CASE), CASE.inputs("cuda") | CASE.outputs("cuda")
    two, of_two = norm_then_maximum()
    workspace = torch.empty(two.get_workspace_size(), dtype=torch.uint8, device="cuda")
    for graph, bound, overlaps in ((one, one.bind(pack), False), (two, two.bind(of_two, workspace), True)):
        captured = timing.capture([bound], least_calls=1)
        assert timing.dependent_launch(captured) in (overlaps, None), graph.explain()  # None: bindings cannot say


def test_kernels_of_one_plan_see_what_the_one_before_wrote():
    """Bit by bit what torch makes of the first kernel's output, in calls that follow one another."""
    graph, pack = norm_then_maximum()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    inputs = [torch.randn_like(pack["x"]) * (1 + n) for n in range(40)]
    outs = [torch.empty_like(pack["out"]) for _ in inputs]
    ones = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    wanted = [graphfuse.functional.rmsnorm(x, ones, 1e-5).amax(1, keepdim=True) for x in inputs]
    for _ in range(50):
        for x, out in zip(inputs, outs, strict=True):
            graph.execute({"x": x, "out": out}, workspace)
        torch.cuda.synchronize()
        for out, want in zip(outs, wanted, strict=True):
            assert torch.equal(out, want)
            out.zero_()


def test_threads_with_and_without(work):
    wanted, target, _ = work
    pack = CASE.inputs("cuda", 1)
    graph, failures = graphs.fused(CASE), []

    def thread(dependent: bool) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(100):
                    out = torch.zeros_like(wanted[0])
                    graph.execute(pack | {"out": out}, programmatic_dependent_launch=dependent)
                    stream.synchronize()
                    if not torch.equal(out, wanted[0]):
                        failures.append("wrong result")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(n % 2 == 1,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_an_older_device_is_refused():
    if device.get("cuda:0").sm >= 90:
        pytest.skip("this device has it")
    with pytest.raises(graphfuse.GraphNotSupportedError, match="needs SM90 or newer; cuda:0 is SM"):
        graphs.fused(CASE).execute(CASE.inputs("cuda") | CASE.outputs("cuda"), programmatic_dependent_launch=True)
