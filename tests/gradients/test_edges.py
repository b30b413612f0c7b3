"""Gradients where there is no derivative, or none that is a number: what torch's own functions have there."""

import math

import pytest
import torch
from torch.nn import functional

from graphfuse import differentiate, reduction_mode
from support import differentiated

INF, NAN = math.inf, math.nan
TIES = torch.tensor(
    [[1, 1, 0, -1], [-2, 2, 2, 1], [0, 0, 0, 0], [-3, -3, -3, 3], [INF, INF, 1, 0], [-INF, -INF, -INF, -INF]],
    dtype=torch.float64,
)
ROWS = torch.tensor([[0, 3, 0, 4], [0, 0, 0, 0], [1, -1, 2, -2], [-0.0, 5, 1, 1]], dtype=torch.float64)
POINTS = torch.tensor([[0.0, -0.0, 0.5, -0.5], [1.5, -1.5, 40.0, -40.0], [800.0, -800.0, 1e-300, 1e300]]).double()
OTHER = torch.tensor([[0.0, 0.0, 0.5, 1.0], [-1.5, -1.5, 40.0, 0.0], [0.0, 1.0, INF, -INF]]).double()
FAR = torch.tensor([[800.0, -800.0, 0.0, 1.0], [-INF, 0.0, 1.0, -INF], [1e300, 1e300, 0.0, 0.0]]).double()


def reduced(mode):
    def draw(g, x):
        return g.reduction(x, mode=mode).set_dim([x.get_dim()[0], 1])

    return draw


def clamped(x):
    return torch.where(x > 1.5, 1.5, functional.leaky_relu(x + 0.5, 0.2) - 0.5)


EDGES = {
    "max of equal operands": (lambda g, x, y: g.max(x, y), torch.maximum, POINTS, OTHER),
    "min of equal operands": (lambda g, x, y: g.min(x, y), torch.minimum, POINTS, OTHER),
    "max of one tensor twice": (lambda g, x: g.max(x, x), lambda x: torch.maximum(x, x), POINTS),
    "MAX of equal elements": (reduced(reduction_mode.MAX), lambda x: x.amax(1, keepdim=True), TIES),
    "MIN of equal elements": (reduced(reduction_mode.MIN), lambda x: x.amin(1, keepdim=True), TIES),
    "AMAX of equal magnitudes": (reduced(reduction_mode.AMAX), lambda x: x.abs().amax(1, keepdim=True), TIES),
    "NORM1 at zero": (reduced(reduction_mode.NORM1), lambda x: x.norm(1, 1, keepdim=True), ROWS),
    "NORM2 of zeros": (reduced(reduction_mode.NORM2), lambda x: x.norm(2, 1, keepdim=True), ROWS),
    "MUL_NO_ZEROS": (
        reduced(reduction_mode.MUL_NO_ZEROS),
        lambda x: torch.where(x == 0, 1.0, x).prod(1, keepdim=True),
        ROWS,
    ),
    "abs": (lambda g, x: g.abs(x), torch.abs, POINTS),
    "relu": (lambda g, x: g.relu(x), torch.relu, POINTS),
    "leaky relu": (lambda g, x: g.relu(x, negative_slope=0.1), lambda x: functional.leaky_relu(x, 0.1), POINTS),
    "clipped relu": (lambda g, x: g.relu(x, negative_slope=0.2, lower_clip=-0.5, upper_clip=1.5), clamped, POINTS[:2]),
    "sqrt": (lambda g, x: g.sqrt(x), torch.sqrt, POINTS.abs()),
    "rsqrt": (lambda g, x: g.rsqrt(x), torch.rsqrt, POINTS[:2].abs()),
    "reciprocal": (lambda g, x: g.reciprocal(x), torch.reciprocal, POINTS[:2]),
    "log": (lambda g, x: g.log(x), torch.log, POINTS.abs()),
    "log1p": (lambda g, x: g.log1p(x), torch.log1p, POINTS.abs()),
    "expm1": (lambda g, x: g.expm1(x), torch.expm1, POINTS),
    "exp": (lambda g, x: g.exp(x), torch.exp, POINTS),
    "div by zero": (lambda g, x, y: g.div(x, y), torch.div, POINTS[:2], OTHER[:2]),
    "sigmoid": (lambda g, x: g.sigmoid(x), torch.sigmoid, POINTS),
    "tanh": (lambda g, x: g.tanh(x), torch.tanh, POINTS),
    "swish": (lambda g, x: g.swish(x), functional.silu, POINTS[:2]),
    "gelu": (lambda g, x: g.gelu(x), functional.gelu, POINTS[:2]),
    "gelu_approx_tanh": (
        lambda g, x: g.gelu_approx_tanh(x),
        lambda x: functional.gelu(x, approximate="tanh"),
        POINTS[:2],
    ),
    "a choice": (
        lambda g, x, y: g.binary_select(g.exp(x), y, g.cmp_lt(x, 10.0)),
        lambda x, y: torch.where(x < 10, x.exp(), y),
        POINTS,
        OTHER,
    ),
    "softmax far from zero": (lambda g, x: g.softmax(x), lambda x: x.softmax(1), FAR),
    "log_softmax far from zero": (lambda g, x: g.log_softmax(x), lambda x: x.log_softmax(1), FAR),
    "logsumexp far from zero": (lambda g, x: g.logsumexp(x), lambda x: x.logsumexp(1, keepdim=True), FAR),
}


@pytest.mark.parametrize("name", EDGES)
def test_as_torch(name):
    draw, exact, *values = EDGES[name]
    g = differentiated.new()
    read = [g.tensor(list(v.shape), name=n) for n, v in zip("xy", values, strict=False)]
    out = draw(g, *read).set_output().set_name("out").set_data_type(differentiated.DOUBLE)
    made = differentiate(g, [out], read)
    got, want = ([v.clone().requires_grad_() for v in values] for _ in range(2))
    (out,), same = differentiated.function(made)(*got), exact(*want)
    grad = torch.linspace(0.5, 2.0, same.numel(), dtype=torch.float64).reshape(same.shape)
    torch.testing.assert_close(out, same, equal_nan=True)
    out.backward(grad), same.backward(grad)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.grad, other.grad, equal_nan=True, rtol=1e-12, atol=1e-16)
