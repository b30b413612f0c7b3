"""torch's own norms run by graphfuse: values, gradients, what is left to torch, and where an override begins and ends.

On CPU tensors torch comes to its fused layer norm alone; its fused RMSNorm is called by name.
"""

import threading

import pytest
import torch
from torch.nn import functional as F

import graphfuse
from graphfuse import torch as training
from graphfuse.torch.operators import definitions
from support.training_calls import EPS, layer_norm, norm

pytestmark = pytest.mark.torch

FORWARD, BACKWARD = "native_layer_norm", "native_layer_norm_backward"
RMS, RMS_BACKWARD = "_fused_rms_norm", "_fused_rms_norm_backward"


def fused_rms_norm(x, shape, weight=None, eps=EPS):
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


@pytest.fixture
def ours(monkeypatch):
    """The names of graphs that are planned for calls unlike any before, with those of all calls by fast paths."""
    found = []
    for operator in (definitions.RMS_NORM, definitions.LAYER_NORM, definitions.LAYER_NORM_BIAS):
        for step in ("training", "gradients"):
            function = getattr(operator, step)

            def seen(*values, function=function):
                found.append(function.declaration.name)
                return function(*values)

            seen.declaration = function.declaration
            monkeypatch.setitem(operator.__dict__, step, seen)
    return found


def leaves(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def run(function, given, outer):
    y = function(*given)
    return [y.detach(), *torch.autograd.grad(y, [t for t in given if t is not None], outer)]


LAYER_NORMS = {
    "plain": (lambda x: F.layer_norm(x, (64,), eps=EPS), ((3, 5, 64),)),
    "weight": (lambda x, w: F.layer_norm(x, (64,), w, eps=EPS), ((3, 5, 64), (64,))),
    "bias": (lambda x, w, b: F.layer_norm(x, (64,), w, b, EPS), ((3, 5, 64), (64,), (64,))),
    "two dimensions": (lambda x, w, b: F.layer_norm(x, (4, 16), w, b, EPS), ((3, 4, 16), (4, 16), (4, 16))),
    "one row": (lambda x, w: F.layer_norm(x, (64,), w, eps=EPS), ((64,), (64,))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LAYER_NORMS)
def test_layer_norm(case, dtype, ours):
    function, shapes = LAYER_NORMS[case]
    given = leaves(*shapes, dtype=dtype)
    outer = torch.randn(shapes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    want = run(function, given, outer)
    with training.override(["cpu"]) as report:
        made = run(function, given, outer)
    assert report.graphfuse == {FORWARD: 1, BACKWARD: 1} and not report.torch
    assert [name.removeprefix("layer_norm_bias").removeprefix("layer_norm") for name in ours] == [
        "_training",
        "_backward",
    ]
    dims = tuple(range(-(len(shapes[1]) if len(shapes) > 1 else 1), 0))
    wide = [t.detach().double().requires_grad_() for t in given]

    def exact(x, w=None, b=None):
        y = layer_norm(x.flatten(dims[0]), None).view(x.shape)
        y = y if w is None else y * w
        return y if b is None else y + b

    right = run(exact, wide, outer.double())
    unit = torch.finfo(dtype).eps
    for mine, torchs, value in zip(made, want, right, strict=True):
        assert mine.dtype == torchs.dtype and mine.shape == torchs.shape and mine.stride() == torchs.stride()
        # On the CPU torch keeps statistics in the type of x, and so does the override for the backward.
        scale = max(1.0, value.abs().max().item())
        torch.testing.assert_close(mine.double(), value, rtol=4 * unit + 1e-6, atol=(4 * unit + 1e-5) * scale)


def test_statistics_are_torchs():
    for dtype in (torch.float32, torch.bfloat16):
        (x,) = leaves((2, 3, 4, 16), dtype=dtype)
        want = torch.native_layer_norm(x, (4, 16), None, None, EPS)
        with training.override(["cpu"]):
            made = torch.native_layer_norm(x, (4, 16), None, None, EPS)
        for a, b in zip(made, want, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64,), (4, 16)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(weighted, shape, dtype, ours):
    given = leaves((3, 5, *shape), *[shape] * weighted, dtype=dtype)
    outer = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with training.override(["cpu"]) as report:
        made = run(lambda x, w=None: fused_rms_norm(x, shape, w), given, outer)
    assert report.graphfuse == {RMS: 1, RMS_BACKWARD: 1} and not report.torch
    assert ours == ["rms_norm_training", "rms_norm_backward"]
    wide = [t.detach().double().requires_grad_() for t in given]
    last = -len(shape)
    exact = lambda x, w=None: norm(x.flatten(last), None if w is None else w.flatten()).view(x.shape)  # noqa: E731
    for mine, value in zip(made, run(exact, wide, outer.double()), strict=True):
        unit, scale = torch.finfo(dtype).eps, max(1.0, value.abs().max().item())
        torch.testing.assert_close(mine.double(), value, rtol=unit + 1e-6, atol=(unit + 1e-5) * scale)


def test_an_epsilon_that_is_not_given():
    for dtype in (torch.float32, torch.float64):
        x = leaves((3, 64), dtype=dtype)[0].detach() * 1e-4
        with training.override(["cpu"]):
            made = fused_rms_norm(x, (64,), None, None)
        torch.testing.assert_close(made, F.rms_norm(x, (64,)))


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_gradients_that_nobody_asks_for(asked):
    given = [t.detach().requires_grad_(i == asked) for i, t in enumerate(leaves((4, 64), (64,), (64,)))]
    (want,) = torch.autograd.grad(F.layer_norm(given[0], (64,), *given[1:]).sum(), given[asked])
    with training.override(["cpu"]) as report:
        F.layer_norm(given[0], (64,), *given[1:]).sum().backward()
    assert report.graphfuse[BACKWARD] == 1
    assert [t.grad is not None for t in given] == [i == asked for i in range(3)]
    torch.testing.assert_close(given[asked].grad, want, rtol=1e-5, atol=1e-5)


DECLINED = {
    "types": (
        lambda: F.layer_norm(torch.ones(2, 8).bfloat16(), (8,), torch.ones(8)),
        "tensors of bfloat16 and float32",
    ),
    "no rows": (lambda: F.layer_norm(torch.ones(0, 8), (8,)), "no elements"),
    "a weight of a column": (
        lambda: F.layer_norm(torch.randn(2, 8), (8,), torch.ones(8, 2)[:, 0]),
        "a weight or bias that is not contiguous",
    ),
    "RMSNorm, types": (
        lambda: fused_rms_norm(torch.ones(2, 8), (8,), torch.ones(8).double()),
        "tensors of float32 and float64",
    ),
}


@pytest.mark.parametrize("case", DECLINED)
def test_what_is_left_to_torch(case, ours):
    call, why = DECLINED[case]
    torch.manual_seed(0)
    want = call()
    torch.manual_seed(0)
    with training.override(["cpu"]) as report:
        made = call()
    assert torch.equal(made, want) and made.dtype == want.dtype and not ours and not report.graphfuse
    ((name, told),) = report.torch
    assert name in (FORWARD, RMS) and told.startswith(why)
    assert str(report).splitlines()[1].split()[:3] == [name, "torch", "1"] and why in str(report)


def test_a_backward_that_is_left_to_torch(ours):
    (x,), (weight,) = leaves((4, 64), dtype=torch.bfloat16), leaves((64,))
    want = torch.autograd.grad(F.layer_norm(x, (64,), weight).sum(), [x, weight])
    with training.override(["cpu"]) as report:
        made = torch.autograd.grad(F.layer_norm(x, (64,), weight).sum(), [x, weight])
    assert all(map(torch.equal, made, want)) and not ours and not report.graphfuse
    assert [name for name, _ in report.torch] == [FORWARD, BACKWARD]


@pytest.mark.parametrize("shape", [(4, 64), (64,)])
def test_a_backward_that_torch_does_not_have(shape, ours):
    """Of its fused RMSNorm on CPU tensors: the formula, where a type of the weight's own leaves it to torch."""
    x, weight = leaves(shape, (64,))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    weight = weight.detach().double().requires_grad_()
    outer = torch.randn(shape)
    with training.override(["cpu"]) as report:
        y = fused_rms_norm(x, (64,), weight)
        made = torch.autograd.grad(y, [x, weight], outer.to(y.dtype))
    assert not ours and [name for name, _ in report.torch] == [RMS, RMS_BACKWARD]
    want = torch.autograd.grad(norm(*wide), wide, outer.double())
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_errors_are_torchs(ours):
    x = torch.ones(2, 8)
    for call in (
        lambda: F.layer_norm(x, (4,)),
        lambda: F.layer_norm(x, (8,), torch.ones(4)),
        lambda: F.layer_norm(torch.ones(2, 4, 2), (4, 2), torch.ones(2, 4)),
        lambda: F.layer_norm(x.int(), (8,)),
    ):
        with pytest.raises(RuntimeError) as without:
            call()
        with training.override(["cpu"]) as report, pytest.raises(type(without.value)) as within:
            call()
        assert str(within.value).splitlines()[0] == str(without.value).splitlines()[0]
        assert not ours and not report.graphfuse
    assert issubclass(type(without.value), RuntimeError) and not isinstance(without.value, graphfuse.GraphfuseError)


def test_nested_and_overlapping(ours):
    (x,) = leaves((4, 64))
    call = lambda: F.layer_norm(x, (64,))  # noqa: E731
    call()
    with training.override(["cpu"]) as outer:
        call()
        with training.override(["cpu"]) as inner:
            call()
        call()
    call()
    assert (outer.graphfuse[FORWARD], inner.graphfuse[FORWARD], len(ours)) == (3, 1, 3)
    first, second = training.override(["cpu"]), training.override(["cpu"]).keep()
    with first:
        second.undo()
        call()
    call()
    assert (first.report.graphfuse[FORWARD], second.report.graphfuse[FORWARD], len(ours)) == (1, 0, 4)


def test_kept_until_undone(ours):
    (x,) = leaves((4, 64))
    kept = training.override(["cpu"]).keep()
    try:
        F.layer_norm(x, (64,))
    finally:
        kept.undo()
    F.layer_norm(x, (64,))
    assert len(ours) == kept.report.graphfuse[FORWARD] == 1
    with pytest.raises(graphfuse.GraphfuseError, match="does not hold"):
        kept.undo()


def test_an_exception_ends_it(ours):
    before = str(torch.library.get_kernel("aten::native_layer_norm", "CPU"))
    with pytest.raises(KeyError), training.override(["cpu"]):
        assert str(torch.library.get_kernel("aten::native_layer_norm", "CPU")) != before
        raise KeyError
    assert str(torch.library.get_kernel("aten::native_layer_norm", "CPU")) == before
    F.layer_norm(torch.ones(2, 8), (8,))
    assert not ours


def test_only_its_devices(ours):
    with training.override() as report:
        F.layer_norm(torch.ones(2, 8), (8,))
    assert not ours and str(report) == "no call of an overridden operator"


@pytest.mark.parametrize("devices", [["xpu"], "cpu", []])
def test_devices_that_are_refused(devices):
    with pytest.raises(graphfuse.VariantPackError, match="devices is .*; accepted: a sequence of 'cuda', 'cpu'"):
        training.override(devices)


def test_all_threads(ours):
    """As torch has one table of kernels: also those that autograd runs a backward on."""
    (x,) = leaves((4, 64))
    threads = [threading.Thread(target=lambda: F.layer_norm(x, (64,)).sum().backward()) for _ in range(4)]
    with training.override(["cpu"]) as report:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert report.graphfuse == {FORWARD: 4, BACKWARD: 4} and len(ours) == 8


def test_a_backward_on_the_other_side():
    x, weight = leaves((4, 64), (64,))
    want = torch.autograd.grad(F.layer_norm(x, (64,), weight).square().sum(), [x, weight])
    with training.override(["cpu"]):
        y = F.layer_norm(x, (64,), weight).square().sum()
    torch.testing.assert_close(torch.autograd.grad(y, [x, weight]), want, rtol=1e-5, atol=1e-5)
    y = F.layer_norm(x, (64,), weight).square().sum()
    with training.override(["cpu"]) as report:
        torch.testing.assert_close(torch.autograd.grad(y, [x, weight]), want, rtol=1e-5, atol=1e-5)
    assert report.graphfuse == {BACKWARD: 1}


def test_what_calls_torchs_norm_itself(monkeypatch):
    """As an engine of somebody else's may: it gets torch's, not itself again."""
    inner = []

    def calls_torch(*values):
        inner.append(1)
        y = torch.native_layer_norm(values[0], values[0].shape[-1:], None, None, EPS)
        return y

    calls_torch.declaration = definitions.LAYER_NORM.training.declaration
    monkeypatch.setitem(definitions.LAYER_NORM.__dict__, "training", calls_torch)
    x = torch.randn(4, 64)
    with training.override(["cpu"]) as report:
        made = F.layer_norm(x, (64,), eps=EPS)
    torch.testing.assert_close(made, F.layer_norm(x, (64,), eps=EPS))
    assert len(inner) == 1 and report.graphfuse == {FORWARD: 1}


@pytest.mark.parametrize("inside", [False, True], ids=["compiled before", "compiled inside"])
def test_compiled_functions(inside, ours):
    """Those whose backend calls torch's operators."""
    torch._dynamo.reset()
    x, weight = leaves((4, 64), (64,))
    compiled = torch.compile(lambda x, w: F.layer_norm(x * 2, (64,), w) * 3, fullgraph=True, backend="aot_eager")
    want = run(lambda x, w: F.layer_norm(x * 2, (64,), w) * 3, (x, weight), torch.ones_like(x))
    if not inside:
        run(compiled, (x, weight), torch.ones_like(x))
    with training.override(["cpu"]) as report:
        made = run(compiled, (x, weight), torch.ones_like(x))
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert report.graphfuse == {FORWARD: 1, BACKWARD: 1} and len(ours) == 2
    run(compiled, (x, weight), torch.ones_like(x))
    assert len(ours) == 2


def test_modules_and_a_training_step(ours):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 32)
    want = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
    with training.override(["cpu"]) as report:
        made = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
    assert report.graphfuse == {FORWARD: 2, BACKWARD: 2}
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.emulate
def test_only_kernels_where_there_are_any(plan_on):
    """On the emulator as on a GPU: torch's own kernel takes the place of the reference engine."""
    plan_on("emulator")
    x = torch.randn(4, 64)
    with training.override(["cpu"]) as report:
        made = F.layer_norm(x, (64,))
        wide = F.layer_norm(x.double(), (64,))
    assert report.graphfuse == {FORWARD: 1}
    ((name, why),) = report.torch
    assert name == FORWARD and "only the reference engine would run" in why and "DOUBLE; accepted: FLOAT" in why
    torch.testing.assert_close(made.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(dtype):
    x, weight, bias = (t.detach().cuda().requires_grad_() for t in leaves((64, 1024), (1024,), (1024,), dtype=dtype))
    outer = torch.randn(64, 1024, device="cuda").to(dtype)
    calls = {
        RMS: (lambda x, w: F.rms_norm(x, (1024,), w, EPS), (x, weight)),
        FORWARD: (lambda x, w, b: F.layer_norm(x, (1024,), w, b, EPS), (x, weight, bias)),
    }
    for name, (function, given) in calls.items():
        want = run(function, given, outer)
        with training.override() as report:
            made = run(function, given, outer)
        assert report.graphfuse == {name: 1, f"{name}_backward": 1} and not report.torch
        unit = torch.finfo(dtype).eps
        for a, b in zip(made, want, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            scale = max(1.0, b.abs().max().item())
            torch.testing.assert_close(a, b, rtol=2 * unit, atol=(2 * unit + 1e-5) * scale)
