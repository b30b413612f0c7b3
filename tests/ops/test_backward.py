"""Backward ops on the reference engine against torch.autograd in float64, and at the ends of the numbers."""

import math

import pytest
import torch

from graphfuse import data_type, heur_mode, norm_forward_phase
from graphfuse.ops import OPS
from support import graphs, oracle
from support.graphs import BF16, FLOAT

INFINITY, NAN = math.inf, math.nan
DTYPES = {FLOAT: torch.float32, data_type.DOUBLE: torch.float64}


def slopes(name: str, inputs, compute=data_type.DOUBLE, loss: float = 1.0, **attributes) -> torch.Tensor:
    """What the op makes of `loss` at each input."""
    x = torch.as_tensor(inputs, dtype=DTYPES[compute])
    g = graphs.new(io_data_type=compute)
    made = getattr(g, name)(
        g.tensor(x.shape, name="loss"), g.tensor(x.shape, name="x"), **attributes, compute_data_type=compute
    )
    made.set_output().set_name("out")
    out = torch.empty_like(x)
    graphs.run(g, {"loss": torch.full_like(x, loss), "x": x, "out": out})
    return out


SMOOTH = {
    "sigmoid_backward": ({},),
    "tanh_backward": ({},),
    "swish_backward": ({}, {"swish_beta": 1.702}, {"swish_beta": -2.0}, {"swish_beta": 0.0}),
    "elu_backward": ({}, {"elu_alpha": 1.0}),
    "softplus_backward": ({}, {"softplus_beta": 1.5}, {"softplus_beta": -0.5}),
    "gelu_backward": ({},),
    "gelu_approx_tanh_backward": ({},),
}


def test_every_activation_has_its_backward():
    activations = {"relu", "elu", "softplus", "sigmoid", "tanh", "swish", "gelu", "gelu_approx_tanh"}
    assert {name.removesuffix("_backward") for name, op in OPS.items() if op.pointwise and "_backward" in name} == (
        activations
    )
    for name in activations:
        forward, backward = OPS[name], OPS[f"{name}_backward"]
        assert [p.name for p in backward.inputs] == ["loss", "input"] and backward.attributes == forward.attributes


@pytest.mark.parametrize(("name", "attributes"), [(n, a) for n, cases in SMOOTH.items() for a in cases])
def test_slopes_are_torchs(name, attributes):
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.linspace(-3, 3, 4001)]).double()
    want = oracle.POINTWISE[name](torch.full_like(x, 1.5), x, **attributes)
    got = slopes(name, x, loss=1.5, **attributes)
    # Where torch's 1 - sigmoid and 1 + tanh cancel, only the absolute error is small.
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", SMOOTH)
def test_slopes_are_those_of_the_forward_op(name):
    """By central differences of the op's own forward."""
    x, step = torch.linspace(-6, 6, 600).double(), 1e-5  # 0, where elu bends, is not among them
    forward = OPS[name.removesuffix("_backward")]
    attributes = {a.name: a.default for a in forward.attributes}

    def value(at):
        return forward.reference(torch, {"input": at}, attributes)["output"]

    want = (value(x + step) - value(x - step)) / (2 * step)
    torch.testing.assert_close(slopes(name, x), want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("compute", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("name", SMOOTH)
def test_slopes_have_their_limits(name, compute):
    rises = name not in ("sigmoid_backward", "tanh_backward")
    far = [1e3, 1e6, 1e20, torch.finfo(DTYPES[compute]).max, INFINITY]
    up, down = slopes(name, far, compute), slopes(name, [-x for x in far], compute)
    assert up.tolist() == [1.0 if rises else 0.0] * 5 and down.abs().tolist() == [0.0] * 5
    assert slopes(name, [NAN], compute).isnan().all()
    assert slopes(name, [1.0], compute, loss=NAN).isnan().all()
    assert slopes(name, [0.5], compute, loss=INFINITY).tolist() == [INFINITY]


def test_swish_slope_has_its_limits_for_any_beta():
    for beta in (-3.0, 1e-3, 1e30):
        falls, rises = slopes("swish_backward", [-INFINITY * beta, INFINITY * beta], swish_beta=beta).tolist()
        assert falls == 0 and rises == 1


@pytest.mark.parametrize("loss", [2.0, INFINITY, NAN])
def test_relu_passes_or_stops_whatever_the_loss(loss):
    def hold(want, x, **attributes):
        got = slopes("relu_backward", x, FLOAT, loss, **attributes)
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=0, atol=0, equal_nan=True)

    hold([0, 0, 0, loss, loss, loss, NAN], [-INFINITY, -1, 0, 1e-45, 5, INFINITY, NAN])
    hold([loss / 2, loss / 2, loss, NAN], [-INFINITY, 0, 1, NAN], negative_slope=0.5)
    clipped = {"lower_clip": -1, "upper_clip": 6}
    hold([0, 0, loss, loss, 0, 0], [-2, -1, -0.5, 6, 6.5, INFINITY], **clipped)


def test_relu_is_torchs():
    x = torch.tensor([-INFINITY, -2, -1e-30, 0, 1e-30, 3, 6, 7, INFINITY]).double()
    for attributes in ({}, {"negative_slope": 0.25}, {"lower_clip": -1, "upper_clip": 6, "negative_slope": 0.1}):
        want = oracle.POINTWISE["relu_backward"](torch.full_like(x, 3), x, **attributes)
        assert torch.equal(slopes("relu_backward", x, loss=3, **attributes), want)


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["relu_backward", *SMOOTH])
def test_kernels_take_them_before_and_after_a_norm(name):
    """As any pointwise op of the table, on the emulator; against float64."""
    g = graphs.new(device="emulator")
    shape = [5, 96]
    tensors = {n: g.tensor(shape, data_type=BF16, name=n) for n in ("dy", "h", "dz")}
    weight = g.tensor([1, 96], data_type=BF16, name="weight")
    x = getattr(g, name)(tensors["dy"], tensors["h"])
    y, inverse = g.rmsnorm(x, weight, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    getattr(g, name)(tensors["dz"], y).set_output().set_name("out")
    inverse.set_output().set_name("inverse")
    g.build([heur_mode.OPENSOURCE])
    assert g.get_engine_and_knobs_at_index(0)[0] == "rows"  # one kernel
    source = graphs.generator("cpu", 3)
    pack = {n: torch.randn(shape, generator=source).mul(3).bfloat16() for n in tensors}
    pack["weight"] = torch.randn(1, 96, generator=source).bfloat16()
    out, inverse = torch.empty(shape), torch.empty(5, 1)
    g.execute(pack | {"out": out, "inverse": inverse}, graphs.workspace(g.get_workspace_size()))
    backward = oracle.POINTWISE[name]
    want, want_inverse = oracle.rmsnorm(backward(pack["dy"], pack["h"]), pack["weight"], 1e-5)
    torch.testing.assert_close(out.double(), backward(pack["dz"], want), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inverse.double(), want_inverse, rtol=1e-5, atol=0)
