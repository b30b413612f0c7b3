"""cuDNN's engine on a GPU: each kind of node and epilogue against float64, beside our kernels and the reference;
threads, streams, capture, workspace, plans.

Skipped where nvidia-cudnn-frontend or libcudnn is missing.
"""

import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import graphfuse
from graphfuse import (
    GraphNotSupportedError,
    WorkspaceError,
    behavior_note,
    heur_mode,
    norm_forward_phase,
    plugins,
)
from graphfuse.engine import No
from graphfuse.engines.cudnn import package
from support import graphs, whole
from support.graphs import BF16, FLOAT, HALF

pytestmark = pytest.mark.gpu

INFERENCE, TRAINING = norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING
TORCH = {BF16: torch.bfloat16, HALF: torch.float16, FLOAT: torch.float32}
ENGINES = ["cudnn", "reference"]


@pytest.fixture(scope="module", autouse=True)
def cudnn():
    found = package.load()
    if isinstance(found, No):
        pytest.skip(str(found))
    return found


def values(shape, dtype=BF16, seed=0, last=False):
    """Random numbers; last: with the second axis innermost in memory."""
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(TORCH[dtype])
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]) if last else x


@dataclass
class Case:
    """A graph under construction beside the same in float64. pack: what is bound, by name."""

    g: object
    pack: dict

    def tensor(self, data, name, dtype=BF16):
        self.pack[name] = data
        return self.g.tensor(data.shape, data.stride(), dtype, name=name)

    def output(self, t, exact, name="out", dtype=BF16, like=None):
        like = torch.empty(exact.shape, dtype=TORCH[dtype], device="cuda") if like is None else torch.empty_like(like)
        t.set_output().set_name(name).set_data_type(dtype).set_dim(like.shape).set_stride(like.stride())
        self.pack[name] = like.fill_(float("nan"))
        return name, exact


def new(name="graph") -> Case:
    return Case(graphs.new(name, device="cuda"), {})


def takes(g) -> dict[str, str]:
    """Node -> the engine that runs it in the selected plan."""
    parts = g._planner.at(g._planner.selected()).parts
    return {node.name: part.engine.name for part in parts for node in part.region.subgraph.nodes}


def run(case: Case, modes=(heur_mode.A,), engines=ENGINES, **kwargs):
    case.g.build(list(modes), engines=engines)
    space = graphs.workspace(case.g.get_workspace_size(), "cuda") if case.g.get_workspace_size() else None
    case.g.execute(case.pack, space, **kwargs)
    torch.cuda.synchronize()
    return space


def hold(case: Case, *wanted, rtol=8e-3, atol=8e-3):
    for name, exact in wanted:
        torch.testing.assert_close(case.pack[name].double(), exact, rtol=rtol, atol=atol)


def all_by_cudnn(case: Case) -> None:
    assert set(takes(case.g).values()) == {"cudnn"}, case.g.explain()
    assert len(case.g._planner.at(case.g._planner.selected()).parts) == 1


# Each kind of node


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B, heur_mode.FALLBACK])
@pytest.mark.parametrize("dtype", [BF16, HALF], ids=lambda d: d.name)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["plain", "batched"])
def test_matmul(dtype, batch, mode):
    case = new()
    a, b = values([*batch, 128, 256], dtype), values([*batch, 256, 64], dtype, 1) * 0.0625
    y = case.g.matmul(case.tensor(a, "a", dtype), case.tensor(b, "b", dtype))
    want = case.output(y, a.double() @ b.double(), dtype=dtype)
    run(case, [mode])
    hold(case, want)
    assert mode is not heur_mode.A or takes(case.g) == {"matmul.0": "cudnn"}, case.g.explain()


EPILOGUES = {
    "bias": (["bias"], lambda y, p: y + p["bias"]),
    "bias, relu": (["bias", "relu"], lambda y, p: (y + p["bias"]).relu()),
    "bias, gelu": (
        ["bias", "gelu_approx_tanh"],
        lambda y, p: F.gelu(y + p["bias"], approximate="tanh"),
    ),
    "swish": (["swish"], lambda y, p: F.silu(y)),
    "bias, residual": (["bias", "residual"], lambda y, p: y + p["bias"] + p["residual"]),
    "scale": (["scale", "bias", "relu"], lambda y, p: (y * 0.5 + p["bias"]).relu()),
    "given scale": (["given", "bias"], lambda y, p: y * 0.25 + p["bias"]),
}


def epilogue(case: Case, y, names, shape, dtype=BF16, channels=False):
    """The pointwise nodes of an epilogue, and the numbers that they read, in float64."""
    of_bias = [1, shape[1], *[1] * (len(shape) - 2)] if channels else [*[1] * (len(shape) - 1), shape[-1]]
    read = {}
    for name in names:
        if name == "bias":
            data = values(of_bias, dtype, 7)
            y, read[name] = case.g.bias(y, case.tensor(data, "bias", dtype)), data.double()
        elif name == "residual":
            data = values(shape, dtype, 8, last=channels)
            y, read[name] = case.g.add(y, case.tensor(data, "residual", dtype)), data.double()
        elif name == "scale":
            y = case.g.mul(y, 0.5)
        elif name == "given":
            factor = case.g.tensor([1] * len(shape), data_type=FLOAT, is_pass_by_value=True, name="factor")
            case.pack["factor"], y = 0.25, case.g.mul(y, factor)
        else:
            y = getattr(case.g, name)(y)
    return y, read


@pytest.mark.parametrize(("names", "exact"), EPILOGUES.values(), ids=EPILOGUES)
def test_matmul_with_its_epilogue(names, exact):
    case = new()
    a, b = values([2, 128, 256]), values([2, 256, 64], seed=1) * 0.0625
    y = case.g.matmul(case.tensor(a, "a"), case.tensor(b, "b"))
    y, read = epilogue(case, y, names, [2, 128, 64])
    want = case.output(y, exact(a.double() @ b.double(), read))
    run(case)
    hold(case, want)
    all_by_cudnn(case)


@pytest.mark.parametrize("names", [[], ["bias"], ["bias", "relu"], ["bias", "residual"]], ids=" ".join)
@pytest.mark.parametrize("axes", [2, 3])
def test_convolution_with_its_epilogue(axes, names):
    case = new()
    x = values([2, 32, 6, 8, 8][: axes + 2], last=True)
    w = (values([64, 32, *[3] * axes], seed=1, last=True).double() * 0.0625).bfloat16()
    w = w.contiguous(memory_format=torch.channels_last if axes == 2 else torch.channels_last_3d)
    y = case.g.conv_fprop(case.tensor(x, "x"), case.tensor(w, "w"), padding=[1] * axes)
    exact = (F.conv2d if axes == 2 else F.conv3d)(x.double(), w.double(), padding=1)
    y, read = epilogue(case, y, names, list(exact.shape), channels=True)
    exact = exact + read.get("bias", 0) + read.get("residual", 0)
    exact = exact.relu() if "relu" in names else exact
    want = case.output(y, exact, like=values(exact.shape, last=True))
    run(case)
    hold(case, want)
    assert takes(case.g)["conv_fprop.0"] == "cudnn", case.g.explain()


def test_a_float32_convolution_is_not_rounded():
    case = new()
    x, w = values([2, 16, 8, 8], FLOAT, last=True), values([32, 16, 3, 3], FLOAT, 1, last=True)
    y = case.g.conv_fprop(case.tensor(x, "x", FLOAT), case.tensor(w, "w", FLOAT), padding=[1, 1])
    exact = F.conv2d(x.double(), w.double(), padding=1)
    want = case.output(y, exact, dtype=FLOAT, like=values(exact.shape, FLOAT, last=True))
    run(case)
    hold(case, want, rtol=1e-5, atol=1e-4)


def test_a_float32_product_goes_to_the_reference_engine():
    case = new()
    a, b = values([64, 64], FLOAT), values([64, 64], FLOAT, 1)
    want = case.output(
        case.g.matmul(case.tensor(a, "a", FLOAT), case.tensor(b, "b", FLOAT)), a.double() @ b.double(), dtype=FLOAT
    )
    run(case)
    hold(case, want, rtol=1e-5, atol=1e-4)
    assert takes(case.g) == {"matmul.0": "reference"}
    assert "float32 would be read as TF32" in case.g.explain()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("stats", [False, True], ids=["", "stats"])
def test_sdpa(causal, stats):
    case = new()
    q, k, v = (values([2, 4, 128, 64], HALF, n) for n in range(3))
    o, s = case.g.sdpa(
        *(case.tensor(t, n, HALF) for t, n in ((q, "q"), (k, "k"), (v, "v"))),
        attn_scale=0.125,
        use_causal_mask=causal,
        generate_stats=stats,
    )
    scores = 0.125 * q.double() @ k.double().mT
    if causal:
        scores.masked_fill_(torch.ones(128, 128, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    wanted = [case.output(o, scores.softmax(-1) @ v.double(), dtype=HALF)]
    if stats:
        wanted.append(case.output(s, scores.logsumexp(-1, keepdim=True), "stats", FLOAT))
    run(case)
    hold(case, *wanted)
    all_by_cudnn(case)


@pytest.mark.parametrize("phase", [INFERENCE, TRAINING], ids=lambda p: p.name)
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_norms_of_rows(op, phase):
    case = new()
    x, scale, bias = values([256, 1024]), values([1, 1024], seed=1), values([1, 1024], seed=2)
    exact, wanted = x.double(), []
    given_bias = case.tensor(bias, "bias")
    args = case.tensor(x, "x"), case.tensor(scale, "scale")
    if op == "rmsnorm":
        y, *rest = case.g.rmsnorm(*args, 1e-5, given_bias, norm_forward_phase=phase)
        statistics = []
    else:
        y, *rest = case.g.layernorm(*args, given_bias, 1e-5, norm_forward_phase=phase)
        statistics = [exact.mean(-1, keepdim=True)]
        exact = exact - statistics[0]
    inverse = (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    wanted.append(case.output(y, exact * inverse * scale.double() + bias.double()))
    if phase is TRAINING:
        for n, (t, s) in enumerate(zip(rest, [*statistics, inverse], strict=True)):
            wanted.append(case.output(t, s, f"statistic{n}", FLOAT))
    run(case)
    hold(case, *wanted, atol=2e-2)
    all_by_cudnn(case)


def test_a_norm_is_a_kernels_where_both_are_there():
    case = new()
    x, scale = values([256, 1024]), values([1, 1024], seed=1)
    y = case.g.rmsnorm(case.tensor(x, "x"), case.tensor(scale, "scale"), 1e-5, norm_forward_phase=INFERENCE)[0]
    inverse = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = case.output(y, x.double() * inverse * scale.double())
    run(case, engines=["rows", *ENGINES])
    hold(case, want, atol=2e-2)
    assert takes(case.g) == {"rmsnorm.0": "rows"}


# Whole graphs


@st.composite
def layers(draw):
    """Some of: a product with an epilogue, a norm, softmax, on [2, 64, 128] in bfloat16."""
    kinds = st.sampled_from(["product", "norm", "softmax"])
    middle = draw(st.lists(kinds, max_size=3))
    return [
        (kind, tuple(draw(st.lists(st.sampled_from(["bias", "relu", "swish", "add"]), max_size=3))))
        for kind in ["product", *middle]
    ]


def layered(found, engines, modes=(heur_mode.A,)):
    """Each layer's result is stored as bfloat16, as the next one's input. -> the results, the engines of the nodes"""
    case = new()
    x = values([2, 64, 128])
    t, stored = case.tensor(x, "x"), []
    for n, (kind, after) in enumerate(found):
        if kind == "product":
            t = case.g.matmul(t, case.tensor((values([1, 128, 128], seed=n) * 0.09).bfloat16(), f"w{n}"))
        elif kind == "norm":
            t = case.g.rmsnorm(
                t, case.tensor(values([1, 1, 128], seed=n), f"s{n}"), 1e-3, norm_forward_phase=INFERENCE
            )[0]
        else:
            t = case.g.softmax(t)
        for m, name in enumerate(after):
            if name in ("bias", "add"):
                shape = [1, 1, 128] if name == "bias" else [2, 64, 128]
                t = getattr(case.g, name)(t, case.tensor(values(shape, seed=20 * n + m), f"{name}{n}_{m}"))
            else:
                t = getattr(case.g, name)(t)
        case.output(t, x, f"out{n}")
        stored.append(f"out{n}")
    run(case, modes, engines)
    return case, [case.pack[name] for name in stored]


def exactly(found, case):
    """Each layer in float64, from what the one before it stored."""
    t = case.pack["x"].double()
    for n, (kind, after) in enumerate(found):
        p = {name: data.double() for name, data in case.pack.items()}
        if kind == "product":
            t = t @ p[f"w{n}"]
        elif kind == "norm":
            t = t * (t.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * p[f"s{n}"]
        else:
            t = t.softmax(-1)
        for m, name in enumerate(after):
            t = {"relu": torch.relu, "swish": F.silu}[name](t) if name in ("relu", "swish") else t + p[f"{name}{n}_{m}"]
        yield t
        t = p[f"out{n}"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(found=layers())
def test_random_layers_by_cudnn_by_kernels_and_by_the_reference(found):
    for engines in (ENGINES, ["rows", *ENGINES], ["rows", "reference"], ["reference"]):
        case, results = layered(found, engines)
        products = {e for name, e in takes(case.g).items() if name.startswith("matmul")}
        assert products == {"cudnn" if "cudnn" in engines else "reference"}, case.g.explain()
        for got, exact in zip(results, exactly(found, case), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=whole.drawn(max_ops=8), mode=st.sampled_from([heur_mode.A, heur_mode.B, heur_mode.FALLBACK]))
def test_any_graph_in_float32(graph, mode):
    """Products are the reference engine's; convolutions and norms cuDNN's, where it has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHFUSE_CUDNN", "on")
        plugins.forget()
        graphs.check_drawn(graph, [mode], "cuda")
    plugins.forget()


# Plans


def dense(seed=0, name="graph") -> tuple[Case, tuple]:
    """relu(a @ b + bias)"""
    case = new(name)
    a, b = values([512, 512], seed=seed), (values([512, 256], seed=seed + 1) * 0.04).bfloat16()
    y = case.g.matmul(case.tensor(a, "a"), case.tensor(b, "b"))
    y, read = epilogue(case, y, ["bias", "relu"], [512, 256])
    return case, case.output(y, (a.double() @ b.double() + read["bias"]).relu())


def test_every_plan_of_cudnns():
    case, want = dense()
    case.g.validate()
    case.g.build_operation_graph(engines=ENGINES)
    case.g.create_execution_plans([heur_mode.A, heur_mode.B])
    tried = 0
    for index in range(min(case.g.get_execution_plan_count(), 12)):
        try:
            case.g.build_plan_at_index(index)
        except GraphNotSupportedError:
            continue
        case.pack["out"].fill_(float("nan"))
        size = case.g.get_workspace_size_plan_at_index(index)
        case.g.execute_plan_at_index(case.pack, graphs.workspace(size, "cuda") if size else None, index)
        torch.cuda.synchronize()
        hold(case, want)
        tried += case.g.get_plan_name_at_index(index).startswith("cudnn")
    assert tried


def test_a_plan_is_chosen_by_engine_and_knobs():
    case, want = dense()
    run(case)
    engine, knobs = case.g.get_engine_and_knobs_at_index(case.g._planner.selected())
    assert engine == "cudnn" and set(knobs) == {"engine", "knobs"}
    again, want = dense()
    again.g.validate()
    again.g.build_operation_graph(engines=ENGINES)
    again.g.create_execution_plan(engine, knobs)
    again.g.build_plans()
    size = again.g.get_workspace_size()
    again.g.execute(again.pack, graphs.workspace(size, "cuda") if size else None)
    torch.cuda.synchronize()
    hold(again, want)
    with pytest.raises(GraphNotSupportedError, match="cuDNN proposes no such plan; it proposes"):
        again.g.create_execution_plan("cudnn", {"engine": 9999})


def test_notes_are_cudnns():
    case, _ = dense()
    run(case)
    index = case.g._planner.selected()
    assert all(isinstance(note, behavior_note) for note in case.g.get_behavior_notes_for_plan_at_index(index))
    assert any("cuDNN: sums in FLOAT" in note for note in case.g.get_numerical_notes_at_index(index))


def test_a_workspace_is_asked_for_and_kept_to():
    case = new()
    x, w = values([2, 16, 8, 8], FLOAT, last=True), values([32, 16, 3, 3], FLOAT, 1, last=True)
    y = case.g.conv_fprop(case.tensor(x, "x", FLOAT), case.tensor(w, "w", FLOAT), padding=[1, 1])
    exact = F.conv2d(x.double(), w.double(), padding=1)
    want = case.output(y, exact, dtype=FLOAT, like=values(exact.shape, FLOAT, last=True))
    case.g.build([heur_mode.A], engines=ENGINES)
    size = case.g.get_workspace_size()
    if not size:
        pytest.skip("this cuDNN's plan needs none")
    with pytest.raises(WorkspaceError):
        case.g.execute(case.pack, None)
    guarded = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device="cuda")
    case.g.execute(case.pack, guarded[256 : 256 + size])
    torch.cuda.synchronize()
    hold(case, want, rtol=1e-5, atol=1e-4)
    assert (guarded[:256] == 0xA5).all() and (guarded[256 + size :] == 0xA5).all()


# Calls


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
    before = torch.cuda.mem_get_info()[0]
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        case.g.execute(case.pack, space)
    for _ in range(3):
        case.pack[name].fill_(float("nan"))
        recorded.replay()
        torch.cuda.synchronize()
        hold(case, (name, exact))
    for _ in range(50):
        case.g.execute(case.pack, space)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)  # the captured graph's own memory aside


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
