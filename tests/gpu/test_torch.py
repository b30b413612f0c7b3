"""graphfuse.torch on a GPU: results and gradients against float64, and torch's own machinery around them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graphfuse import torch as training
from graphfuse.functional import problem
from support.training_calls import (
    EPS,
    OPERATORS,
    WITHOUT_WEIGHT,
    check,
    gradients,
    grads,
    operator_checks,
    tensors,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def one_kernel(monkeypatch):
    """Every call that the test plans is one kernel; backward, too, where there is an engine for it."""
    used, plan = [], problem.plan
    monkeypatch.setattr(problem, "plan", lambda *a: used.append((a[0], plan(*a))) or used[-1][1])
    yield
    for name, found in used:
        engine = found.plan.engine_and_knobs[0]
        assert engine == "rows", f"{name}\n{found.plan}"


def made(name, shape=(333, 1024), dtype=torch.bfloat16, weight=None, seed=0, grad=True):
    return tensors(name, shape, dtype, weight, DEVICE, seed, grad)


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPERATORS)
def test_types(name, dtype):
    for weight in (dtype, torch.float32, *[False] * (name in WITHOUT_WEIGHT)):
        check(name, made(name, dtype=dtype, weight=weight))


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("hidden", [1, 111, 760, 3584, 16384])
@pytest.mark.parametrize("name", OPERATORS)
def test_hidden_sizes(name, hidden):
    check(name, made(name, (97, hidden)))


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("shape", [(1, 1024), (9, 37, 1024), (2, 3, 5, 7, 1024), (1024,)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes(name, shape):
    check(name, made(name, shape))


@pytest.mark.parametrize("name", OPERATORS)
def test_no_rows(name):
    check(name, made(name, (0, 1024)))


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("name", ["add_rms_norm", "gemma_add_rms_norm", "rms_norm_silu_gate"])
def test_types_of_their_own(name):
    for other in (torch.float32, torch.float16):
        check(name, made(name, dtype={"x": torch.bfloat16, "residual": other, "gate": other}))


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_apart(name):
    """Rows of wider tensors, read where they are."""

    def apart(t):
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 64), 7.0, device=DEVICE, dtype=t.dtype)
        return wide[..., 32:-32].copy_(t.detach()).requires_grad_() if t.dim() > 1 else t

    check(name, {n: apart(t) for n, t in made(name).items()})


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_any_strides(name):
    """Of a sum, which is one element; transposed; in a wider tensor."""
    for shape in (
        lambda g: g[:1, :1].expand(333, 1024),
        lambda g: g.mT.contiguous().mT,
        lambda g: g.repeat(1, 2)[:, :1024],
    ):
        given = made(name)
        y = OPERATORS[name].run(given)
        outer = tuple(shape(g) for g in grads(y))
        got = gradients(y, given, outer)
        want = gradients(y := OPERATORS[name].run(given), given, tuple(g.contiguous() for g in outer))
        for n in given:
            torch.testing.assert_close(got[n], want[n], rtol=0.016, atol=1e-3)


@pytest.mark.parametrize("name", OPERATORS)
def test_float64_by_the_reference_engine(name):
    given = made(name, (3, 6), torch.float64)
    order = OPERATORS[name].tensors
    assert torch.autograd.gradcheck(
        lambda *values: OPERATORS[name].run(dict(zip(order, values, strict=True))), [*given.values()]
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_bits_every_time(name):
    given = made(name, (4096, 1024))
    y = OPERATORS[name].run(given)
    outer = grads(y)
    first = gradients(y, given, outer)
    for _ in range(10):
        again = OPERATORS[name].run(given)
        found = gradients(again, given, outer)
        assert all(torch.equal(a, b) for a, b in zip(again, y, strict=True))
        assert all(torch.equal(found[n], first[n]) for n in given)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    operator_checks(name, device=DEVICE)


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_by_inductor(name):
    def around(given):
        return tuple(y * 3 for y in OPERATORS[name].run({n: t * 2 for n, t in given.items()}))

    torch._dynamo.reset()
    fast = torch.compile(around, fullgraph=True, dynamic=True)
    for n, rows in enumerate((5, 7, 64, 1000, 2)):
        given = made(name, (rows, 4, 256), torch.float32, seed=n)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got = fast(given)
        want = around(given)
        outer = grads(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        found, exact = gradients(got, given, outer), gradients(want, given, outer)
        for argument in given:
            torch.testing.assert_close(found[argument], exact[argument], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_checkpoint(name, use_reentrant):
    given = made(name)
    y = OPERATORS[name].run(given)
    want = gradients(y, given, outer := grads(y))
    order = OPERATORS[name].tensors
    found = checkpoint(
        lambda *values: OPERATORS[name].run(dict(zip(order, values, strict=True))),
        *given.values(),
        use_reentrant=use_reentrant,
    )
    torch.autograd.backward(found, outer)
    assert all(torch.equal(t.grad, want[n]) for n, t in given.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing(name, dtype):
    given = made(name, dtype=dtype, weight=torch.float32)
    y = OPERATORS[name].run(given)
    want = gradients(y, given, outer := grads(y))
    with torch.autocast(DEVICE, torch.bfloat16):
        found = OPERATORS[name].run(given)
    got = gradients(found, given, outer)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, y, strict=True))
    assert all(torch.equal(got[n], want[n]) for n in given)


def test_streams():
    """Forward and backward on a stream of its own, beside work on the default one."""
    given, side = made("rms_norm_silu", (4096, 2048)), torch.cuda.Stream()
    y = OPERATORS["rms_norm_silu"].run(given)
    want = gradients(y, given, outer := grads(y))
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(side):
            found = OPERATORS["rms_norm_silu"].run(given)
            got = gradients(found, given, outer)
        other = OPERATORS["rms_norm_silu"].run(given)
        beside = gradients(other, given, outer)
        torch.cuda.synchronize()
        assert torch.equal(found[0], y[0]) and torch.equal(other[0], y[0])
        assert all(torch.equal(got[n], want[n]) and torch.equal(beside[n], want[n]) for n in given)


def test_captured_step():
    """Forward, backward and update in a CUDA graph, replayed on other inputs."""
    module = torch.nn.Sequential(training.RMSNorm(512), torch.nn.Linear(512, 512), training.RMSNormSiLU(512)).to(DEVICE)
    x = torch.randn(64, 512, device=DEVICE)

    def step():
        for p in module.parameters():
            p.grad = None
        module(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is compiled is compiled before
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = [p.grad for p in module.parameters()]
    for _ in range(2):
        x.normal_()
        graph.replay()
        got = [g.clone() for g in captured]
        step()
        for a, p in zip(got, module.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)


def test_modules_are_torchs():
    for kind, then in ((training.RMSNorm, torch.nn.Identity()), (training.RMSNormSiLU, torch.nn.SiLU())):
        module, other = kind((8, 128), eps=EPS, device=DEVICE), torch.nn.RMSNorm((8, 128), eps=EPS, device=DEVICE)
        torch.nn.init.normal_(other.weight)
        module.load_state_dict(other.state_dict())
        x = torch.randn(33, 8, 128, device=DEVICE, requires_grad=True)
        y, want = module(x), then(other(x))
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        outer = torch.randn_like(y)
        got = torch.autograd.grad(y, (x, module.weight), outer)
        exact = torch.autograd.grad(want, (x, other.weight), outer)
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_training_run(tmp_path):
    """Losses stay together: examples/train_decoder.py judges."""
    example = Path(__file__).resolve().parents[2] / "examples" / "train_decoder.py"
    done = subprocess.run(
        [sys.executable, example, "--device", DEVICE, "--steps", "200", "--plot", "losses.svg"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree" in done.stdout
