"""Torch's kernels as an engine on a GPU: results beside float64, streams, capture, settings of torch's, shapes."""

import threading

import pytest
import torch
from torch.nn import functional as F

import graphfuse
from graphfuse import convolution_mode, heur_mode
from support import attention_options, graphs
from support.graphs import BF16, FLOAT, HALF
from support.on_cudnn import dense, hold, new, run, takes, values

pytestmark = pytest.mark.gpu

ENGINES = ["rows", "torch", "reference"]
ROUNDED = {BF16: 2**-8, HALF: 2**-11, FLOAT: 2**-16}
MATMUL = torch.backends.cuda.matmul
LOOSE = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture(params=[False, True], ids=["exact", "loose"])
def loose(request):
    """Settings of torch's as they are exact, and as they are not."""
    names = (*LOOSE, "allow_fp16_accumulation")
    before = {name: getattr(MATMUL, name) for name in names}
    for name in names:
        setattr(MATMUL, name, request.param)
    yield
    assert {name: getattr(MATMUL, name) for name in names} == dict.fromkeys(names, request.param)
    for name, value in before.items():
        setattr(MATMUL, name, value)


def near(case, exact, dtype, name="out"):
    size = exact.abs().max().item()
    torch.testing.assert_close(case.pack[name].double(), exact, rtol=ROUNDED[dtype], atol=ROUNDED[FLOAT] * size)


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B, heur_mode.FALLBACK])
@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_products(loose, dtype, batch, mode):
    case, a, b = new(), values((*batch, 64, 4096), dtype), values((*batch, 4096, 96), dtype, 1)
    y = case.g.matmul(case.tensor(a, "a", dtype), case.tensor(b, "b", dtype), name="product")
    exact = a.double() @ b.double()
    case.output(y, exact, dtype=dtype)
    run(case, [mode], ENGINES)
    assert takes(case.g) == {"product": "torch"}
    near(case, exact, dtype)


@pytest.mark.parametrize("after", ["bias", "relu", "gelu"])
def test_pointwise_nodes_behind_a_product(after):
    case, a, b, bias = new(), values((96, 256)), values((256, 64), seed=1), values((1, 64), seed=2)
    y = case.g.bias(case.g.matmul(case.tensor(a, "a"), case.tensor(b, "b")), case.tensor(bias, "bias"))
    exact = a.double() @ b.double() + bias.double()
    if after != "bias":
        y, exact = getattr(case.g, after)(y), getattr(F, after)(exact)
    case.output(y, exact)
    run(case, engines=ENGINES)
    assert set(takes(case.g).values()) == ({"torch", "rows"} if after == "gelu" else {"torch"})
    near(case, exact, BF16)


def test_a_float32_result_of_narrow_operands():
    case, a, b = new(), values((96, 256)), values((256, 64), seed=1)
    exact = a.double() @ b.double()
    case.output(case.g.matmul(case.tensor(a, "a"), case.tensor(b, "b")), exact, dtype=FLOAT)
    run(case, engines=ENGINES)
    near(case, exact, FLOAT)


WINDOWS = {
    "padded": ({"padding": [1, 1]}, 1),
    "strided": ({"padding": [1, 2], "stride": [2, 1], "dilation": [1, 2]}, 1),
    "uneven": ({"pre_padding": [1, 0], "post_padding": [2, 1]}, 1),
    "groups": ({"padding": [1, 1]}, 4),
    "turned": ({"convolution_mode": convolution_mode.CONVOLUTION}, 1),
}


def convolved(x, w, given, groups):
    both = given.get("padding", [0, 0])
    before, after = given.get("pre_padding", both), given.get("post_padding", both)
    x = F.pad(x, (before[1], after[1], before[0], after[0]))
    w = w.flip(2, 3) if "convolution_mode" in given else w
    return F.conv2d(x, w, None, given.get("stride", 1), 0, given.get("dilation", 1), groups)


@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions_and_their_gradients(window, last, dtype):
    given, groups = WINDOWS[window]
    x, w = values((2, 32, 19, 16), dtype, 0, last), values((64, 32 // groups, 3, 3), dtype, 1, last)
    exact_x, exact_w = (t.double().requires_grad_() for t in (x, w))
    y = convolved(exact_x, exact_w, given, groups)
    loss = values(y.shape, dtype, 2, last)
    y.backward(loss.double())
    for name, read, exact in (
        ("conv_fprop", {"image": x, "weight": w}, y.detach()),
        ("conv_dgrad", {"loss": loss, "filter": w}, exact_x.grad),
        ("conv_wgrad", {"image": x, "loss": loss}, exact_w.grad),
    ):
        case = new()
        made = getattr(case.g, name)(**{port: case.tensor(t, port, dtype) for port, t in read.items()}, **given)
        like = values(exact.shape, dtype, 3, last)
        case.output(made, exact, dtype=dtype, like=like)
        run(case, engines=ENGINES)
        assert set(takes(case.g).values()) == {"torch"}
        near(case, exact, dtype)


def test_a_convolution_of_volumes_and_its_gradients():
    x, w = values((2, 32, 5, 8, 8), last=True), values((64, 32, 3, 3, 3), seed=1, last=True)
    exact_x, exact_w = (t.double().requires_grad_() for t in (x, w))
    y = F.conv3d(exact_x, exact_w, None, (1, 2, 1), 1)
    loss = values(y.shape, seed=2, last=True)
    y.backward(loss.double())
    for name, read, exact in (
        ("conv_fprop", {"image": x, "weight": w}, y.detach()),
        ("conv_dgrad", {"loss": loss, "filter": w}, exact_x.grad),
        ("conv_wgrad", {"image": x, "loss": loss}, exact_w.grad),
    ):
        case = new()
        ports = {port: case.tensor(t, port) for port, t in read.items()}
        made = getattr(case.g, name)(**ports, padding=[1, 1, 1], stride=[1, 2, 1])
        case.output(made, exact, like=values(exact.shape, seed=3, last=True))
        run(case, engines=ENGINES)
        assert set(takes(case.g).values()) == {"torch"}
        near(case, exact, BF16)


def attended(case, shape, others=None, heads=None, dtype=BF16, **asked):
    """The outputs of sdpa, and in float64 the scores and v."""
    batch, count, rows, columns = shape
    of_k = (batch, heads or count, others or rows, columns)
    q, k, v = values(shape, dtype), values(of_k, dtype, 1), values(of_k, dtype, 2)
    made = case.g.sdpa(*(case.tensor(t, n, dtype) for n, t in zip("qkv", (q, k, v), strict=True)), **asked)
    k, v = (t.double().repeat_interleave(count // of_k[1], 1) for t in (k, v))
    return made, q.double() @ k.transpose(-1, -2) * asked["attn_scale"], v


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize(
    ("others", "asked", "seen"),
    [
        (None, {}, lambda i, j: j >= 0),
        (None, {"use_causal_mask": True}, lambda i, j: j <= i),
        (None, {"use_causal_mask": True, "sliding_window_length": 17}, lambda i, j: (j <= i) & (j > i - 17)),
        (
            None,
            {"diagonal_band_left_bound": 9, "diagonal_band_right_bound": 5},
            lambda i, j: (j <= i + 5) & (j > i - 9),
        ),
        (90, {"use_causal_mask_bottom_right": True}, lambda i, j: j <= i + 20),
        (90, {}, lambda i, j: j >= 0),
    ],
)
def test_attention(others, asked, seen, heads, dtype):
    shape, case = (2, 4, 70, 64), new()
    made, scores, v = attended(case, shape, others, heads, dtype, attn_scale=0.125, generate_stats=True, **asked)
    i, j = torch.arange(70, device="cuda")[:, None], torch.arange(others or 70, device="cuda")
    scores = scores.masked_fill(~seen(i, j).expand(70, others or 70), -float("inf"))
    case.output(made[0], scores.softmax(-1) @ v, dtype=dtype)
    case.output(made[1], scores.logsumexp(-1, keepdim=True), "stats", FLOAT)
    run(case, engines=ENGINES)
    assert set(takes(case.g).values()) == {"torch"}
    hold(case, ("out", scores.softmax(-1) @ v), rtol=2e-2, atol=2e-2)
    hold(case, ("stats", scores.logsumexp(-1, keepdim=True)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("name", "back"), attention_options.CASES)
def test_attention_and_its_gradients_of_all_options(name, back, heads):
    case = new()
    case.pack, exact = attention_options.drawn(case.g, name, heads, back, "cuda")
    run(case, engines=ENGINES)
    assert takes(case.g) == {"attention": "torch"}
    attention_options.hold(case.pack, exact)


@pytest.mark.parametrize("name", ["bias", "bias of columns", "padding, bias, causal"])
def test_the_gradient_of_a_bias(name):
    case = new()
    case.pack, exact = attention_options.drawn(case.g, name, 4, True, "cuda", of_bias=True)
    run(case, engines=ENGINES)
    assert takes(case.g) == {"attention": "torch"}
    attention_options.hold(case.pack, exact)


def test_threads_on_streams_of_their_own():
    case, _ = dense()
    run(case, engines=ENGINES)
    work, size = [dense(seed=10 * n)[0].pack for n in range(4)], case.g.get_workspace_size()
    wanted, failures = [], []
    for pack in work:
        case.g.execute(pack, graphs.workspace(size, "cuda") if size else None)
        wanted.append(pack["out"].clone())
    torch.cuda.synchronize()

    def thread(number: int) -> None:
        stream, pack = torch.cuda.Stream(), work[number]
        space = graphs.workspace(size, "cuda") if size else None
        with torch.cuda.stream(stream):
            for _ in range(100):
                pack["out"].zero_()
                case.g.execute(pack, space)
        stream.synchronize()
        if not torch.equal(pack["out"], wanted[number]):
            failures.append(number)

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(len(work))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_work_is_on_the_callers_stream():
    """The input is filled late, on the stream: work anywhere else would read the old one."""
    case, (name, exact) = dense()
    space = run(case, engines=ENGINES)
    late, stream, handle = case.pack["a"].clone(), torch.cuda.Stream(), graphfuse.create_handle("cuda:0")
    graphfuse.set_stream(handle, stream)
    case.pack["a"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.pack["a"].copy_(late)
    case.g.execute(case.pack, space, handle=handle)
    torch.cuda.synchronize()
    hold(case, (name, exact))


@pytest.mark.parametrize("kind", ["product", "convolution", "attention"])
def test_calls_are_captured(kind):
    case = new()
    if kind == "product":
        y = case.g.matmul(case.tensor(values((64, 64)), "a"), case.tensor(values((64, 64), seed=1), "b"))
        shape = (64, 64)
    elif kind == "convolution":
        x, w = values((2, 32, 9, 9), last=True), values((32, 32, 3, 3), seed=1, last=True)
        y, shape = case.g.conv_fprop(case.tensor(x, "a"), case.tensor(w, "w"), padding=[1, 1]), (2, 32, 9, 9)
    else:
        q, shape = values((2, 4, 64, 64)), (2, 4, 64, 64)
        t = case.tensor(q, "a")
        y = case.g.sdpa(t, t, t, attn_scale=0.125, use_causal_mask=True)[0]
    like = values(shape, last=len(shape) == 4 and kind == "convolution")
    case.output(y, like, like=like)
    run(case, engines=ENGINES)
    wanted = case.pack["out"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.g.execute(case.pack)
    case.pack["out"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(case.pack["out"], wanted)


def test_other_numbers_of_rows():
    g = graphs.new(device="cuda", io_data_type=BF16, is_override_shape_enabled=True)
    a, b = (g.tensor([m, n], data_type=BF16, name=name) for m, n, name in ((64, 128, "a"), (128, 32, "b")))
    out = g.matmul(a, b).set_output().set_name("out").set_data_type(BF16)
    g.build([heur_mode.A], engines=ENGINES)
    for rows in (64, 1, 200):
        pack = {"a": values((rows, 128)), "b": values((128, 32), seed=1), "out": values((rows, 32), seed=2)}
        uids = [t.get_uid() for t in (a, out)]
        g.execute(pack, override_uids=uids, override_shapes=[[rows, 128], [rows, 32]])
        exact = pack["a"].double() @ pack["b"].double()
        torch.testing.assert_close(pack["out"].double(), exact, rtol=2**-8, atol=1e-4)
