"""Executing on a GPU: streams, threads, devices, kinds of values, aliasing, capture, refusals."""

import threading

import pytest
import torch
from hypothesis import given, settings

import graphfuse
from graphfuse import DeviceError, VariantPackError, WorkspaceError, heur_mode
from support import graphs
from support.graphs import BF16, FLOAT, FP4, Norm

pytestmark = pytest.mark.gpu

CASE = Norm(999, 320)


def expected(case: Norm, pack: dict) -> torch.Tensor:
    outputs = case.outputs("cuda")
    graphs.fused(case).execute(pack | outputs)
    torch.cuda.synchronize()
    return outputs["out"]


def test_eight_threads_execute_one_graph_on_eight_streams():
    graph = graphs.fused(CASE)
    work = [(CASE.inputs("cuda", seed), CASE.outputs("cuda")) for seed in range(8)]
    wanted = [expected(CASE, pack) for pack, _ in work]
    failures, barrier = [], threading.Barrier(8)

    def thread(number: int) -> None:
        try:
            handle = graphfuse.create_handle("cuda:0")
            stream = torch.cuda.Stream()
            graphfuse.set_stream(handle, stream)
            pack, outputs = work[number]
            barrier.wait()
            for turn in range(100):
                with torch.cuda.stream(stream):
                    outputs["out"].zero_()
                    graph.execute(pack | outputs, None, handle if turn % 2 else None)
            stream.synchronize()
            if not torch.equal(outputs["out"], wanted[number]):
                failures.append(f"thread {number}: wrong result")
        except Exception as error:
            failures.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(8)]
    torch.cuda.synchronize()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.parametrize("by", ["torch's current stream", "handle"])
def test_work_is_ordered_on_its_stream(by):
    """The input is filled late, on the stream: a launch anywhere else would read the old one."""
    graph, pack, outputs = graphs.fused(CASE), CASE.inputs("cuda"), CASE.outputs("cuda")
    wanted, x = expected(CASE, pack), pack["x"].clone()
    handle, stream = graphfuse.create_handle("cuda:0"), torch.cuda.Stream()
    graphfuse.set_stream(handle, stream.cuda_stream)
    pack["x"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        pack["x"].copy_(x)
        if by != "handle":
            graph.execute(pack | outputs)
    if by == "handle":
        graph.execute(pack | outputs, None, handle)
    stream.synchronize()
    assert torch.equal(outputs["out"], wanted)


def test_the_reference_engine_is_ordered_on_the_default_stream():
    case = graphs.Norm(4096, 1024)
    graph = case.graph("cuda")
    graph.build([heur_mode.FALLBACK])
    inputs, outputs = case.inputs("cuda"), case.outputs("cuda")
    right = inputs["x"].clone()
    inputs["x"].zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    inputs["x"].copy_(right)
    graph.execute(inputs | outputs)
    late = outputs["out"].clone()
    torch.cuda.synchronize()
    graph.execute(inputs | outputs)
    torch.cuda.synchronize()
    assert late.abs().max() > 0 and torch.equal(late, outputs["out"])


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices; there is {torch.cuda.device_count()}")
    built = {device: graphs.fused(CASE, device) for device in ("cuda:0", "cuda:1")}
    results = {}
    for current in (0, 1):
        with torch.cuda.device(current):
            for device, graph in built.items():
                pack, outputs = CASE.inputs("cuda:0"), CASE.outputs(device)
                graph.execute(
                    {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in pack.items()} | outputs
                )
                assert torch.cuda.current_device() == current
                results[device, current] = outputs["out"]
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    first = results["cuda:0", 0].cpu()
    assert all(torch.equal(out.cpu(), first) for out in results.values())
    with pytest.raises(VariantPackError, match="on cuda:1; accepted: cuda:0"):
        built["cuda:0"].execute(CASE.inputs("cuda:1") | CASE.outputs("cuda:0"))
    with pytest.raises(DeviceError, match=r"planned for cuda:0 \(.*\); the handle is for cuda:1"):
        built["cuda:0"].execute({}, None, graphfuse.create_handle("cuda:1"))


class ArrayInterface:
    """Nothing but __cuda_array_interface__."""

    def __init__(self, t):
        self.__cuda_array_interface__ = t.__cuda_array_interface__


class Exported:
    """Nothing but DLPack."""

    def __init__(self, t):
        self.t = t

    def __dlpack__(self, **arguments):
        return self.t.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.t.__dlpack_device__()


@pytest.mark.parametrize(
    "value", [torch.Tensor.data_ptr, ArrayInterface, Exported], ids=["address", "array interface", "dlpack"]
)
def test_values(value):
    case = Norm(77, 64, FLOAT, FLOAT, FLOAT, FLOAT)
    pack, outputs = case.inputs("cuda"), case.outputs("cuda")
    wanted = expected(case, pack)
    graphs.fused(case).execute({k: value(v) for k, v in (pack | outputs).items()})
    torch.cuda.synchronize()
    assert torch.equal(outputs["out"], wanted)


@pytest.mark.parametrize(
    "case",
    [Norm(999, 320), Norm(33, 65537), Norm(33, 64, FLOAT, FLOAT, FLOAT, input_stride=72, output_stride=72)],
    ids=["packed", "long rows", "rows apart"],
)
def test_in_place(case):
    """Output onto input, where layout and type are the same, gives the same bits."""
    pack = case.inputs("cuda")
    wanted = expected(case, pack)
    graphs.fused(case).execute(pack | {"out": pack["x"]})
    assert torch.equal(pack["x"], wanted)


def test_unsafe_aliasing_is_refused_and_nothing_written():
    graph, pack = graphs.fused(CASE), CASE.inputs("cuda")
    memory = torch.zeros(2 * 999 * 320, dtype=torch.bfloat16, device="cuda")
    pack["x"] = memory[: 999 * 320].view(999, 320)
    for start in (8, 999 * 320 - 8):
        with pytest.raises(VariantPackError, match="'out'.*overlaps.*'x'"):
            graph.execute(pack | {"out": memory[start : start + 999 * 320].view(999, 320)})
    wide = Norm(8, 64, BF16, BF16, FLOAT)
    raw = torch.zeros(8 * 64, device="cuda")
    with pytest.raises(VariantPackError, match="'out'.*overlaps.*'x'"):
        x = raw[:256].view(torch.bfloat16).view(8, 64)
        graphs.fused(wide).execute(wide.inputs("cuda") | {"x": x, "out": raw.view(8, 64)})
    assert not memory.any() and not raw.any()


REFUSED = {
    "host memory": (lambda p: {"x": p["x"].cpu()}, VariantPackError, "'x'.*on cpu; accepted: cuda:0"),
    "host output": (lambda p: {"out": p["out"].cpu()}, VariantPackError, "'out'.*on cpu"),
    "alignment": (
        lambda p: {"weight": p["weight"].data_ptr() + 2},
        VariantPackError,
        "'weight'.*multiple of 2 bytes.*of 16",
    ),
    "shape": (lambda p: {"x": p["x"][1:]}, VariantPackError, r"'x'.*\[998, 320\].*\[999, 320\]"),
    "type": (lambda p: {"x": p["x"].half()}, TypeError, "'x'.*HALF.*BFLOAT16"),
    "device scalar": (lambda p: {"epsilon": torch.zeros(1, device="cuda")}, TypeError, "'epsilon'.*item"),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_launch(change, error, message):
    case = Norm(999, 320, eps=None)
    pack = case.inputs("cuda") | case.outputs("cuda")
    before = pack["out"].clone()
    with pytest.raises(error, match=message):
        graphs.fused(case).execute(pack | change(pack))
    torch.cuda.synchronize()
    assert torch.equal(pack["out"].view(torch.uint8), before.view(torch.uint8))


def test_workspace_on_the_device_and_aligned_to_256():
    case = Norm(64, 64, output=FP4)
    graph, pack = graphs.fused(case), case.inputs("cuda") | case.outputs("cuda")
    size = graph.get_workspace_size()
    for workspace, message in (
        (None, "no workspace"),
        (graphs.workspace(size - 1, "cuda"), f"at least {size}"),
        (graphs.workspace(size + 16, "cuda")[16:], "multiple of 16 bytes; accepted: a multiple of 256"),
        (graphs.workspace(size), "on cpu"),
    ):
        with pytest.raises(WorkspaceError, match=message):
            graph.execute(pack, workspace)


def test_capture_and_replay():
    graph, pack, outputs = graphs.fused(CASE), CASE.inputs("cuda"), CASE.outputs("cuda")
    graph.execute(pack | outputs)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        graph.execute(pack | outputs)
    for seed in (1, 2):
        other = CASE.inputs("cuda", seed)
        pack["x"].copy_(other["x"]), pack["weight"].copy_(other["weight"])
        recorded.replay()
        torch.cuda.synchronize()
        assert torch.equal(outputs["out"], expected(CASE, other))


@settings(max_examples=15)
@given(graphs.drawn())
def test_any_graph_in_mode_a(drawn):
    """Kernels where patterns match, the reference engine for the rest, intermediates in the workspace."""
    graphs.check_drawn(drawn, [heur_mode.A], "cuda")


def test_bind_follows_the_stream_and_is_captured():
    graph, pack, outputs = graphs.fused(CASE), CASE.inputs("cuda"), CASE.outputs("cuda")
    wanted, x = expected(CASE, pack), pack["x"].clone()
    run = graph.bind(pack | outputs)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        outputs["out"].zero_(), pack["x"].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            pack["x"].copy_(x)
            run()
        stream.synchronize()
        assert torch.equal(outputs["out"], wanted)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        run()
    for seed in (1, 2):
        other = CASE.inputs("cuda", seed)
        pack["x"].copy_(other["x"]), pack["weight"].copy_(other["weight"])
        recorded.replay()
        torch.cuda.synchronize()
        assert torch.equal(outputs["out"], expected(CASE, other))


def test_a_repeated_call_follows_the_stream_and_the_memory():
    """After calls that were remembered: another stream, other memory, memory that a tensor was given since."""
    graph, pack, outputs = graphs.fused(CASE), CASE.inputs("cuda"), CASE.outputs("cuda")
    x, wanted = pack["x"].clone(), expected(CASE, pack)
    for _ in range(3):
        graph.execute(pack | outputs)
    pack["x"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        pack["x"].copy_(x)
        graph.execute(pack | outputs)
    stream.synchronize()
    assert torch.equal(outputs["out"], wanted)
    other = CASE.inputs("cuda", 3)
    pack["x"].data, pack["weight"].data = other["x"], other["weight"]
    graph.execute(pack | outputs)
    torch.cuda.synchronize()
    assert torch.equal(outputs["out"], expected(CASE, other))
    pack["x"].data = other["x"].cpu()
    with pytest.raises(VariantPackError, match="'x'.*on cpu; accepted: cuda:0"):
        graph.execute(pack | outputs)


def test_functional_allocates_on_the_input_s_device():
    devices = [f"cuda:{n}" for n in range(min(2, torch.cuda.device_count()))]
    for current in range(len(devices)):
        with torch.cuda.device(current):
            for place in devices * 2:
                x = torch.randn(8, 64, device=place).bfloat16()
                weight = torch.ones(64, device=place).bfloat16()
                out = graphfuse.fused_rmsnorm_silu(x, weight)
                assert str(out.device) == place and out.is_contiguous() and out.dtype == x.dtype
                want = torch.nn.functional.silu(torch.nn.functional.rms_norm(x.float(), (64,), None, 1e-6))
                torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


def test_no_rows_launch_nothing():
    case = Norm(0, 64, training=True)
    graph = graphs.fused(case)
    graph.execute(case.inputs("cuda") | case.outputs("cuda") | {"x": 0, "out": 0})
    torch.cuda.synchronize()


def test_functional_on_the_gpu():
    x, weight = CASE.inputs("cuda")["x"].view(9, 111, 320), CASE.inputs("cuda")["weight"].view(320)
    out = graphfuse.fused_rmsnorm_silu(x, weight, 1e-5)
    assert torch.equal(out.view(999, 320), expected(CASE, CASE.inputs("cuda")))
    assert graphfuse.fused_rmsnorm_silu(x, weight, 1e-5, out=x) is x and torch.equal(x, out)
