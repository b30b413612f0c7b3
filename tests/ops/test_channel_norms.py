"""Instance and batch normalization and sums of channels against float64, gradients against torch.autograd's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import GraphNotSupportedError, GraphValidationError, heur_mode, norm_forward_phase
from support import graphs
from support.graphs import BF16, FLOAT, HALF, TORCH

INFERENCE, TRAINING = norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING
EPSILON = 1e-3


def exact(x, scale, bias, axes):
    """(Y, mean, inverse standard deviation, variance), means of float64 over `axes`."""
    mean = x.sum(axes, keepdim=True) / (x.numel() // x.sum(axes).numel())
    variance = x.square().mean(axes, keepdim=True) - mean.square()
    inverse = (variance + EPSILON).pow(-0.5)
    return (x - mean) * inverse * scale + bias, mean, inverse, variance


def problem(shape, dtype, channels_last):
    source = graphs.generator("cpu", sum(shape))
    x = torch.randn(shape, generator=source) + 0.5
    x = (x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x).to(TORCH[dtype])
    channel = (1, shape[1], *[1] * (len(shape) - 2))
    scale, bias, mean, variance = (torch.randn(channel, generator=source) for _ in range(4))
    return {"x": x, "scale": scale, "bias": bias, "mean": mean, "variance": variance.abs()}


def run(g, pack, outputs):
    """Every output of a graph, float32."""
    for name, t in outputs.items():
        t.set_output().set_name(name).set_data_type(FLOAT)
    g.validate()
    made = {name: torch.empty_strided(t.get_dim(), t.get_stride()).fill_(7.0) for name, t in outputs.items()}
    read = {t.name for t in g._ir.bound}
    graphs.run(g, {name: t for name, t in pack.items() if name in read} | made)
    return made


def close(made, want):
    for name, t in want.items():
        torch.testing.assert_close(made[name].double(), t, rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}: {m}")


SHAPES = st.lists(st.integers(2, 5), min_size=3, max_size=5)


@given(shape=SHAPES, dtype=st.sampled_from([BF16, HALF, FLOAT]), last=st.booleans(), training=st.booleans())
def test_instancenorm(shape, dtype, last, training):
    pack, g = problem(shape, dtype, last), graphs.new()
    x, scale, bias = (g.tensor_like(pack[name], name=name) for name in ("x", "scale", "bias"))
    made = g.instancenorm(x, scale, bias, EPSILON, norm_forward_phase=TRAINING if training else INFERENCE)
    assert [t is not None for t in made] == [True, training, training]
    axes = tuple(range(2, len(shape)))
    names = ("y", "m", "i")
    found = run(g, pack, {n: t for n, t in zip(names, made, strict=True) if t is not None})
    want = dict(zip(names, exact(pack["x"].double(), pack["scale"], pack["bias"], axes)[:3], strict=True))
    assert all(want[name].shape == t.shape for name, t in found.items())
    close(found, {name: want[name] for name in found})


ROWS = [(2, 3, 7), (1, 5, 4, 4), (3, 1, 6, 5), (1, 1, 3, 3), (2, 8, 3, 4, 5), (2, 3, 1, 1)]


@pytest.mark.emulate
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 7), (1, 5, 4, 4), (3, 1, 6, 5), (1, 1, 3, 3), (2, 8, 3, 4, 5), (2, 3, 1, 1)], ids=str
)
def test_instancenorm_and_what_follows_are_one_kernel(shape, last):
    """One scale and bias a row, the same for all samples; also where channels, samples or columns are one."""
    pack, g = problem(shape, BF16, last), graphs.new(device="emulator")
    x, scale, bias = (
        g.tensor(list(t.shape), list(t.stride()), BF16 if name == "x" else FLOAT, name=name)
        for name, t in list(pack.items())[:3]
    )
    y, mean, inverse = g.instancenorm(x, scale, bias, EPSILON, norm_forward_phase=TRAINING)
    outputs = {"y": g.swish(y), "m": mean, "i": inverse}
    for name, t in outputs.items():
        t.set_output().set_name(name).set_data_type(FLOAT)
    g.build([heur_mode.OPENSOURCE])
    (region,) = g.explanation().regions
    assert region.engine == "rows"
    found = {t.name: torch.empty_strided(t.dim, t.stride).fill_(7.0) for t in g._ir.outputs}
    g.execute({name: pack[name] for name in ("x", "scale", "bias")} | found, graphs.workspace(g.get_workspace_size()))
    y, mean, inverse, _ = exact(pack["x"].double(), pack["scale"], pack["bias"], tuple(range(2, len(shape))))
    close(found, {"y": torch.nn.functional.silu(y), "m": mean, "i": inverse})


@pytest.mark.emulate
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("shape", [*ROWS, (16, 24), (1, 3), (5, 1), (1, 1)], ids=str)
def test_batchnorm_inference_and_what_follows_are_one_kernel(shape, last):
    pack, g = problem(shape, BF16, last), graphs.new(device="emulator")
    x, scale, bias, mean, inverse = (
        g.tensor(list(t.shape), list(t.stride()), BF16 if name == "x" else FLOAT, name=name) for name, t in pack.items()
    )
    y = g.relu(g.batchnorm_inference(x, mean, inverse, scale, bias)).set_output().set_name("y").set_data_type(FLOAT)
    g.build([heur_mode.OPENSOURCE])
    (region,) = g.explanation().regions
    assert region.engine == "rows"
    found = torch.empty_strided(y.get_dim(), y.get_stride()).fill_(7.0)
    g.execute(pack | {"y": found}, graphs.workspace(g.get_workspace_size()))
    want = (pack["x"].double() - pack["mean"]) * pack["variance"] * pack["scale"] + pack["bias"]
    close({"y": found}, {"y": want.relu()})


@given(shape=st.lists(st.integers(2, 5), min_size=2, max_size=5), last=st.booleans(), running=st.booleans())
def test_batchnorm(shape, last, running):
    pack, g = problem(shape, FLOAT, last), graphs.new()
    x, scale, bias, *old = (g.tensor_like(pack[name], name=name) for name in pack)
    made = g.batchnorm(x, scale, bias, *(old if running else (None, None)), EPSILON, 0.25 if running else None)
    assert [t is not None for t in made] == [True, True, True, running, running]
    axes = (0, *range(2, len(shape)))
    names = ("y", "m", "i", "next_mean", "next_variance")
    found = run(g, pack, {n: t for n, t in zip(names, made, strict=True) if t is not None})
    y, mean, inverse, variance = exact(pack["x"].double(), pack["scale"], pack["bias"], axes)
    want = {"y": y, "m": mean, "i": inverse}
    if running:
        count = pack["x"].numel() // shape[1]
        want["next_mean"] = 0.75 * pack["mean"] + 0.25 * mean
        want["next_variance"] = 0.75 * pack["variance"] + 0.25 * variance * count / (count - 1)
    close(found, want)
    g = graphs.new()
    tensors = (g.tensor_like(pack[name], name=name) for name in ("x", "mean", "variance", "scale", "bias"))
    found = run(g, pack, {"y": g.batchnorm_inference(*tensors)})
    # What is called variance here is taken as its inverse root.
    close(found, {"y": (pack["x"] - pack["mean"]).double() * pack["variance"] * pack["scale"] + pack["bias"]})


@given(shape=SHAPES, last=st.booleans(), batch=st.booleans())
def test_gradients(shape, last, batch):
    pack, g = problem(shape, FLOAT, last), graphs.new()
    axes = (0, *range(2, len(shape))) if batch else tuple(range(2, len(shape)))
    leaves = [pack[name].double().requires_grad_() for name in ("x", "scale", "bias")]
    y, mean, inverse, _ = exact(*leaves, axes)
    grad = torch.randn(shape, generator=graphs.generator("cpu", 9))
    want = torch.autograd.grad(y, leaves, grad.double())
    pack |= {"grad": grad, "m": mean.detach().float(), "i": inverse.detach().float()}
    tensors = (g.tensor_like(pack[name], name=name) for name in ("grad", "x", "scale", "m", "i"))
    made = (g.batchnorm_backward if batch else g.instancenorm_backward)(*tensors)
    names = ("dx", "dscale", "dbias")
    close(run(g, pack, dict(zip(names, made, strict=True))), dict(zip(names, want, strict=True)))


@given(
    shape=st.lists(st.integers(0, 5), min_size=2, max_size=5), dtype=st.sampled_from([BF16, FLOAT]), last=st.booleans()
)
def test_genstats(shape, dtype, last):
    shape = [max(extent, 1) if axis != 1 else extent for axis, extent in enumerate(shape)]
    pack, g = problem(shape, dtype, last), graphs.new()
    made = run(g, pack, dict(zip(("sum", "squares"), g.genstats(g.tensor_like(pack["x"], name="x")), strict=True)))
    x, axes = pack["x"].double(), (0, *range(2, len(shape)))
    want = {"sum": x.sum(axes, keepdim=True), "squares": x.square().sum(axes, keepdim=True)}
    assert all(made[name].shape == t.shape for name, t in want.items())
    close(made, want)


C = [1, 3, 1, 1]
WRONG = {
    "rank": (
        lambda g, t: g.instancenorm(t([2, 3]), t([1, 3]), t([1, 3]), 1e-5, INFERENCE),
        r"input must be \[N, C, spatial axes...\] with 3 or more axes, got \[2, 3\]",
    ),
    "scale": (
        lambda g, t: g.instancenorm(t([2, 3, 4, 4]), t([1, 3]), t(C), 1e-5, INFERENCE),
        r"scale must have shape \[1, 3, 1, 1\] for input \[2, 3, 4, 4\], got \[1, 3\]",
    ),
    "bias": (
        lambda g, t: g.batchnorm(t([2, 3, 4, 4]), t(C), t([1, 4, 1, 1]), epsilon=1e-5),
        r"bias must have shape \[1, 3, 1, 1\].*got \[1, 4, 1, 1\]",
    ),
    "statistic": (
        lambda g, t: g.instancenorm_backward(t([2, 3, 4, 4]), t([2, 3, 4, 4]), t(C), t(C), t([2, 3, 1, 1])),
        r"mean must have shape \[2, 3, 1, 1\].*got \[1, 3, 1, 1\]",
    ),
    "grad": (
        lambda g, t: g.batchnorm_backward(t([2, 3, 4, 1]), t([2, 3, 4, 4]), t(C), t(C), t(C)),
        r"grad must have shape \[2, 3, 4, 4\].*got \[2, 3, 4, 1\]",
    ),
    "genstats": (
        lambda g, t: g.genstats(t([3])),
        r"input must be \[N, C, spatial axes...\] with 2 or more axes, got \[3\]",
    ),
    "nothing": (
        lambda g, t: g.batchnorm(t([0, 3, 4, 4]), t(C), t(C), epsilon=1e-5),
        r"input \[0, 3, 4, 4\] has no elements along a normalized axis",
    ),
    "running": (
        lambda g, t: g.batchnorm(t([2, 3, 4, 4]), t(C), t(C), t(C), t(C), 1e-5),
        "in_running_mean is given without momentum; give in_running_mean, in_running_var, momentum, or none",
    ),
    "epsilon": (
        lambda g, t: g.instancenorm(t([2, 3, 4, 4]), t(C), t(C), t(C), INFERENCE),
        r"epsilon must have one element, got shape \[1, 3, 1, 1\]; by position: input, scale, bias, epsilon",
    ),
    "phase": (
        lambda g, t: g.instancenorm(t([2, 3, 4, 4]), t(C), t(C), 1e-5),
        "norm_forward_phase is NOT_SET; accepted: INFERENCE, TRAINING",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(call, message):
    g = graphs.new()
    call(g, g.tensor)[0].set_output()
    with pytest.raises(GraphValidationError, match=message):
        g.validate()


def test_statistics_of_other_devices_are_not_offered():
    g = graphs.new()
    tensors = [g.tensor([2, 3, 4, 4]), g.tensor(C), g.tensor(C)]
    g.batchnorm(*tensors, epsilon=1e-5, peer_stats=[])
    with pytest.raises(GraphNotSupportedError, match=r"'batchnorm.1'.*peer_stats is \[<.*; instead: torch"):
        g.batchnorm(*tensors, epsilon=1e-5, peer_stats=[tensors[1]])
