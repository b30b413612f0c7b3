"""Regions compute what eager mode does: operations, numbers and types as torch has them, any extents."""

import math

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import inductor
from graphfuse.torch.regions import composites, selection
from graphfuse.torch.regions.operator import region
from support.regions import BINARY16, FULL, HALF, C, T, found, rows, summed
from support.traces import as_tuple, recorded

pytestmark = pytest.mark.torch

# Operations, each behind a sum that makes it part of a region


OPERATIONS = {
    "add": lambda x, r: x + r,
    "add alpha one": lambda x, r: torch.add(x, r, alpha=1),
    "sub": lambda x, r: x - 2 * r,
    "rsub": lambda x, r: 1 - x,
    "mul": lambda x, r: torch.mul(input=x, other=r),
    "div": lambda x, r: x / (r.abs() + 1),
    "maximum": lambda x, r: torch.maximum(x, r),
    "minimum": lambda x, r: torch.min(x, r),
    "limits": lambda x, r: x.clamp(-0.3, 0.4),
    "one limit": lambda x, r: x.clamp(min=0.1),
    "limits out of order": lambda x, r: x.clamp(1, -1),
    "hardtanh": lambda x, r: F.hardtanh(x, -0.5, 0.5),
    "relu6": lambda x, r: F.relu6(x),
    "abs, neg": lambda x, r: -x.abs(),
    "reciprocal": lambda x, r: (x.abs() + 1).reciprocal(),
    "sqrt": lambda x, r: x.abs().sqrt(),
    "rsqrt": lambda x, r: torch.rsqrt(x.abs() + 1),
    "exp": lambda x, r: (x * 0.1).exp(),
    "log": lambda x, r: (x.abs() + 1).log(),
    "relu": lambda x, r: F.relu(x),
    "leaky_relu": lambda x, r: F.leaky_relu(x, 0.2),
    "sigmoid": lambda x, r: x.sigmoid(),
    "tanh": lambda x, r: x.tanh(),
    "silu": lambda x, r: F.silu(x),
    "gelu": lambda x, r: F.gelu(x),
    "gelu by tanh": lambda x, r: F.gelu(x, approximate="tanh"),
    "powers": lambda x, r: x**2 + x**3 + (x.abs() + 1) ** -0.5 + x.abs() ** 0.5 + (x.abs() + 1) ** -1,
    "where": lambda x, r: torch.where(r > 0.1, x, r),
    "where with numbers": lambda x, r: torch.where(r != 0, x, -1.0) + torch.where(x <= r, 0.5, x),
    "masked_fill": lambda x, r: x.masked_fill(r > 0, -2.0),
    "truth values": lambda x, r: (x > 0).to(x.dtype) * x + torch.where((x > 0) * (r < 0), x, r),
    "to truth values": lambda x, r: F.relu(x).to(torch.bool).to(x.dtype) + x,
    "half": lambda x, r: x.to(BINARY16),
    "no dropout": lambda x, r: F.dropout(x, 0.0, True) * 2,
    "views": lambda x, r: x[None].squeeze(0).view(1, T, C).reshape(T, C) * 2,
    "sum": lambda x, r: x.sum(-1),
    "mean": lambda x, r: x.mean(-1, keepdim=True),
    "sum in float32": lambda x, r: x.sum(-1, dtype=FULL),
    "amax": lambda x, r: x.amax(-1),
    "amin": lambda x, r: x.amin(-1, keepdim=True),
    "norms": lambda x, r: (
        x.norm(dim=-1) + torch.linalg.vector_norm(x, 1, -1) + torch.linalg.vector_norm(x, math.inf, -1)
    ),
    "variance": lambda x, r: x.float().var(-1) + x.float().var(-1, correction=0),
    "variance and mean": lambda x, r: torch.var_mean(x.float(), -1),
    "deviation": lambda x, r: x.std(-1) + x.std(-1, correction=0) + x.float().std(-1, unbiased=False),
    "deviation and mean": lambda x, r: torch.std_mean(x, -1, keepdim=True),
    "largest and smallest": lambda x, r: (x.max(-1)[0], x.min(-1, keepdim=True).values),
    "addcmul": lambda x, r: torch.addcmul(x, r, x, value=0.5) + torch.addcmul(x, r, r),
    "addcdiv": lambda x, r: torch.addcdiv(x, r, x.abs() + 1, value=2),
    "lerp": lambda x, r: torch.lerp(x, r, 0.3) + torch.lerp(x, r, 0.7),
    "lerp by a tensor": lambda x, r: torch.lerp(x, r, r.sigmoid()),
    "softmax": lambda x, r: torch.softmax(x * 0.1, -1),
    "softmax to float32": lambda x, r: torch.softmax(x * 0.1, -1, dtype=FULL),
    "log_softmax": lambda x, r: F.log_softmax(x.float(), -1),
    "logsumexp": lambda x, r: torch.logsumexp(x.float(), -1),
    "layer norm": lambda x, r: F.layer_norm(x, (C,), r[0], r[1], 1e-3),
    "RMS norm": lambda x, r: F.rms_norm(x, (C,), r[0]),
    "normalize": lambda x, r: F.normalize(x, dim=-1),
}


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, dtype):
    function = OPERATIONS[name]
    whole = lambda x, r: function(summed(x), r)  # noqa: E731
    module, given, verdicts = found(whole, rows(dtype), rows(dtype, 1))
    assert verdicts and not any(why for _, why in verdicts)
    calls = [n for n in module.graph.nodes if n.op.startswith("call") and not inductor.is_free(n)]
    assert {n.target for n in calls} == {region}
    close(module(*given), whole(rows(dtype), rows(dtype, 1)))


def close(got, want, rounded=False):
    """rounded: steps on the way are, to 16 bits."""
    for one, other in zip(as_tuple(got), as_tuple(want), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        exact = 2e-2 if other.dtype.itemsize < 4 or rounded else 1e-5
        torch.testing.assert_close(one, other, rtol=exact, atol=exact, equal_nan=True)


# Numbers and types as torch has them


def compared(function, *tensors, exact=True):
    module, given, verdicts = found(function, *tensors)
    assert verdicts and not any(why for _, why in verdicts)
    for one, other in zip(as_tuple(module(*given)), as_tuple(function(*tensors)), strict=True):
        assert one.dtype is other.dtype
        if exact:
            assert torch.equal(torch.nan_to_num(one.float(), 7.0), torch.nan_to_num(other.float(), 7.0))
        else:
            torch.testing.assert_close(one, other, equal_nan=True)


def test_numbers_are_rounded_where_they_are_compared():
    tenth = torch.full((T, C), 0.1).to(HALF)
    compared(lambda x: ((x == 0.1).float(), (x > 0.1).float(), x.sum(-1)), tenth)


def test_tensors_without_dimensions_are_of_the_others_type():
    number = torch.tensor(0.1)
    tenth = torch.full((T, C), 0.1).to(HALF)
    compared(lambda x, s: ((x > s).float(), (s < x).float(), (x == s).float(), x.sum(-1)), tenth, number)
    compared(lambda x, s: ((x >= s).float(), torch.maximum(x, s), torch.where(x > 1, x, s), x.amax(-1)), tenth, number)
    compared(lambda x, s: (torch.addcmul(x, x, s), torch.addcdiv(x, x, s), x.amax(-1)), rows(), number)
    compared(lambda x, s: (x + s, s - x, x * s, s * x, x / s, x.amax(-1)), rows(), torch.tensor(0.3))


MIXED = {
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "mse_loss": F.mse_loss,
    "with logits": F.binary_cross_entropy_with_logits,
    "kl_div": F.kl_div,
}


@pytest.mark.parametrize("types", [(HALF, FULL), (FULL, HALF), (HALF, BINARY16)], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_losses_of_several_types(name, types):
    """Types are those of eager mode, also where torch tells others of tensors without memory."""
    given = rows(types[0]), rows(types[1], 1).sigmoid()

    def function(x, target):
        loss = MIXED[name](summed(x), target, reduction="none")
        return loss, (loss * 2).view(T, C).softmax(-1), loss.sum(-1)

    module, given, _ = found(function, *given)
    assert region in {n.target for n in module.graph.nodes}
    close(module(*given), function(*given), rounded=name == "kl_div")  # eager mode rounds the logarithm


def test_a_cube_rounds_the_square():
    compared(lambda x: (x**3, x.amax(-1)), rows())


def test_truth_values_are_zero_or_one():
    x = F.relu(rows(FULL))
    compared(lambda x: ((x > 0.1) * (x < 0.5), x.to(torch.bool), x.to(torch.bool).float() * 2, x.amax(-1)), x)


@pytest.mark.parametrize("function", ["amax", "softmax", "logsumexp", "relu", "gelu", "silu", "clamp", "norm"])
def test_values_that_are_no_numbers(function):
    x = rows(FULL)
    x[0, 0], x[1, 1], x[2] = math.nan, math.inf, -math.inf
    functions = {
        "amax": lambda x: (x * 2).amax(-1),
        "softmax": lambda x: torch.softmax(x * 2, -1),
        "logsumexp": lambda x: torch.logsumexp(x * 2, -1),
        "relu": lambda x: (F.relu(x), x.amax(-1)),
        "gelu": lambda x: (F.gelu(x[:2]), x[:2].amax(-1)),
        "silu": lambda x: (F.silu(x), x.amax(-1)),
        "clamp": lambda x: (x.clamp(-1, 1), F.relu6(x), x.amax(-1)),
        "norm": lambda x: F.normalize(x, dim=-1),
    }
    compared(functions[function], x, exact=False)


def test_masked_rows():
    compared(lambda x, m: torch.softmax(x.masked_fill(m, -math.inf), -1), rows(FULL), torch.ones(T, C) > 0, exact=False)


def test_fp8_is_what_torch_casts_to():
    x = rows() * 300
    x[0, :3] = torch.tensor([math.nan, math.inf, 464.0])
    compared(lambda x: (x.to(torch.float8_e4m3fn), x.float().amax(-1)), x)


def test_the_gradient_of_fp8_is_left_to_torch():
    function = lambda x: x.abs().amax(-1, keepdim=True).to(torch.float8_e4m3fn)  # noqa: E731
    *_, verdicts = found(function, rows().requires_grad_())
    assert all("float8" not in region.program.operations for region, _ in verdicts)


@pytest.mark.parametrize("function", [lambda x: x.clamp(-0.5, 0.5), lambda x: torch.where(x > 0.1, x, 0.0)])
def test_graphs_that_are_compiled_in_a_mode_of_tensors_without_values(function):
    """As inductor's passes are run."""
    composites._clamp_has_gradients_at_limits.cache_clear()
    module, given = recorded(lambda x: function(summed(x)), (rows(),), "aten")
    with next(iter(module.graph.nodes)).meta["val"].fake_mode:
        verdicts, _ = selection.replace_in(module, False)
    assert [why for _, why in verdicts] == [""]
    assert torch.equal(as_tuple(module(*given))[0], function(summed(rows())))


def test_a_number_that_is_transposed():
    """It has no dimensions to swap."""
    x = rows(FULL)[0]
    function = lambda x: x * x.amax(-1).swapaxes(0, -1)  # noqa: E731
    module, given, verdicts = found(function, x)
    assert [why for _, why in verdicts] == [""]
    torch.testing.assert_close(as_tuple(module(*given))[0], function(x))


def test_rows_that_are_none():
    module, given, verdicts = found(lambda x: torch.softmax(x * 2, -1) + 1, torch.ones(0, C))
    assert verdicts and as_tuple(module(*given))[0].shape == (0, C)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_extents_that_nothing_is_known_of():
    function = lambda x: torch.softmax(x[torch.nonzero(x[:, 0] > 0)[:, 0]] * 2, -1)  # noqa: E731
    taken = []

    def backend(module, inputs):
        taken.extend(why for _, why in selection.replace_in(module, False)[0])
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for seed in (1, 2):
        x = rows(FULL, seed, (9, C))
        torch.testing.assert_close(compiled(x), function(x))
    assert taken == [""]


@pytest.mark.parametrize("columns", [16, 32])
def test_numbers_of_extents_that_vary(columns):
    def function(x, n):
        return torch.softmax(x * x.shape[-1] ** -0.5, -1) * n + x.sum(-1, keepdim=True) * x.shape[0] ** -0.5

    torch.compiler.reset()
    compiled = torch.compile(function, backend="graphfuse", options={"then": "eager"}, dynamic=True)
    for count, n in ((3, 0.5), (5, 2), (7, 0.25)):
        x = rows(FULL, 0, (count, columns))
        torch.testing.assert_close(compiled(x, n), function(x, n))
