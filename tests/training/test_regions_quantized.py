"""Rows that torch quantizes, to integers of 8 bits and to FP8 by powers of two: one region each, with the numbers of
eager mode."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import inductor
from graphfuse.torch.regions.operator import region
from graphfuse.torch.regions.translate import TranslatedGraph
from support.regions import BINARY16, FULL, HALF, found, rows
from support.traces import as_tuple, recorded

pytestmark = pytest.mark.torch

C = 512
FP8 = torch.float8_e4m3fn


def norm(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def int8(x):
    """As W8A8 has it."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-5) / 127
    return torch.round(x.float() / scale).clamp(-128, 127).to(torch.int8), scale


def int8_by_inverse(x):
    """As torchao has it without zero points."""
    limits = torch.minimum(x.amin(-1), -x.amax(-1)).abs().float()
    scale = torch.clamp(limits / 127.5, min=torch.finfo(FULL).eps)[:, None]
    return torch.clamp(torch.round(x * (1.0 / scale)), -128, 127).to(torch.int8), scale.squeeze(-1)


def int8_narrow(x):
    """In the type of the rows and in place, within limits that are the same on both sides."""
    scale = x.abs().max(dim=-1, keepdim=True)[0].clamp_(min=1e-5).div_(127)
    return (x / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def int8_without_limits(x):
    scale = x.float().abs().amax(-1, keepdim=True).clamp(1e-5) / 127
    return (x.float() / scale).to(torch.int8), scale


def uint8(x):
    """With a zero point, which is stored so, too."""
    wide = x.float()
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-8)
    zero = torch.clamp(torch.round(-low / scale), 0, 255)
    codes = torch.clamp(torch.round(wide / scale) + zero, 0, 255).to(torch.uint8)
    return codes, scale, zero.to(torch.uint8)


def affine(x, symmetric):
    """As torchao has it: limits beside tensors of zeros, the inverse of scales, zero points in integers."""
    low, high = x.amin([-1]), x.amax([-1])
    low, high = torch.min(low, torch.zeros_like(low)), torch.max(high, torch.zeros_like(high))
    if symmetric:
        scale = torch.clamp(torch.max(-low, high) / 127.5, min=torch.finfo(FULL).eps)
        zero = torch.full_like(scale, 0)
    else:
        scale = torch.clamp((high - low) / 255, min=torch.finfo(FULL).eps)
        zero = torch.clamp(-128 - torch.round(low / scale), -128, 127)
    zero, scale = zero.to(torch.int8), scale.to(FULL)
    codes = torch.round(x * (1.0 / scale.unsqueeze(-1))) + zero.unsqueeze(-1)
    return torch.clamp(codes, -128, 127).to(torch.int8), scale, *([] if symmetric else [zero])


def affine_symmetric(x):
    return affine(x, symmetric=True)


def affine_with_zero_points(x):
    return affine(x, symmetric=False)


def fp8_again(x):
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((x.float() / scale).to(FP8).float() * scale).to(x.dtype)


def by_method(x):
    """As BitNet has it."""
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127).char(), scale


def again(x):
    """What a reader of the integers gets."""
    codes, scale = int8(x)
    return (codes.float() * scale).to(x.dtype)


def multiplied(x):
    codes, scale, zero = uint8(x)
    return (codes - zero.float()) * scale


def mx(y):
    """Blocks of 32 with a power of two."""
    parts = y.view(*y.shape[:-1], -1, 32)
    largest = parts.abs().amax(-1, keepdim=True).float()
    scale = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - 8)
    return (parts.float() / scale).to(FP8).view(y.shape), scale


def by_power_of_two(x):
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-12) / 448)))
    return (x.float() / scale).to(FP8), scale


def by_blocks(x):
    codes, scale = int8(x.view(*x.shape[:-1], -1, 128))
    return codes.view(x.shape), scale.squeeze(-1)


ROWS = [
    int8,
    int8_narrow,
    int8_without_limits,
    by_method,
    uint8,
    affine_symmetric,
    affine_with_zero_points,
    again,
    fp8_again,
    multiplied,
    by_power_of_two,
]


def given(dtype=HALF, shape=(5, C)):
    """Rows of which one is zeros, one has its largest magnitude, and ties, among others."""
    x = rows(dtype, 3, shape)
    x.view(-1, C)[1] = 0
    x.view(-1, C)[2, :8] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5])
    return x


def check(function, *tensors, how="dynamo"):
    """That a function is one region, bit for bit what eager mode is; the region."""
    module, inputs, verdicts = found(function, *tensors, how=how)
    assert [why for _, why in verdicts] == [""]
    for one, other in zip(as_tuple(module(*inputs)), as_tuple(function(*tensors)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    calls = [n for n in module.graph.nodes if n.op.startswith("call") and not inductor.is_free(n)]
    assert [n.target for n in calls] == [region]
    return verdicts[0][0]


@pytest.fixture
def kernel(kernels):
    """That each program is one kernel on the emulator."""
    yield
    assert kernels and all(parts == [True] for parts in kernels.values())


@pytest.mark.parametrize("how", ["dynamo", "aten"])
@pytest.mark.parametrize("function", ROWS)
def test_rows(function, how, kernel):
    check(function, given(), how=how)


@pytest.mark.parametrize("dtype", [FULL, BINARY16], ids=str)
def test_of_other_types(dtype, kernel):
    check(lambda x: int8(x * 1), given(dtype))


@pytest.mark.parametrize("shape", [(2, 4, C), (2, 1, 3, C), (1, C)], ids=str)
def test_shapes(shape, kernel):
    check(lambda x: int8(x * 1), rows(HALF, 2, shape))


def test_one_dimension_of_scales(kernel):
    check(int8_by_inverse, given())


BEHIND = {
    "SmoothQuant": lambda x, w, g: int8(x / w),
    "RMSNorm": lambda x, w, g: int8(norm(x, w)),
    "SwiGLU": lambda x, w, g: int8(F.silu(g) * x),
    "RMSNorm in blocks": lambda x, w, g: by_blocks(norm(x, w)),
    "RMSNorm in MX blocks": lambda x, w, g: mx(norm(x, w)),
    "blocks": lambda x, w, g: by_blocks(x * 1),
    "MX blocks": lambda x, w, g: mx(x * 1),
}


@pytest.mark.parametrize("how", ["dynamo", "aten"])
@pytest.mark.parametrize("what", BEHIND)
def test_behind_what_models_have(what, how, kernel):
    """Of powers of two, whose norm sums up without rounding; a sigmoid on a GPU is another than torch's, and so is a
    product with it, which is seldom rounded to another integer."""
    source = torch.Generator().manual_seed(0)
    x = torch.exp2(torch.randint(-3, 3, (5, C), generator=source)).to(HALF) * rows(HALF, 1, (5, C)).sign()
    weight = rows(HALF, 2, (C,)).abs() + 0.5
    check(BEHIND[what], x, weight, rows(HALF, 4, (5, C)).sign() * 50, how=how)


def test_what_is_beyond_goes_to_the_ends():
    """torch leaves open what becomes of it."""
    x = rows(FULL, 0, (3, C)) * 1e3
    module, inputs, verdicts = found(lambda x: (x.to(torch.int8), x.sum(-1)), x)
    assert [why for _, why in verdicts] == [""]
    codes, _ = module(*inputs)
    assert torch.equal(codes, x.trunc().clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize(
    "function, truncated",
    [
        (lambda y: y, True),
        (lambda y: y + 0.5, True),
        (lambda y: y.round() * 0.5, True),
        (lambda y: torch.where(y > 0, y.round(), 0.5), True),
        (lambda y: y.round().clamp(-3, 3) - 1, False),
        (lambda y: torch.where(y > 0, y.floor(), y.ceil()).abs() * 2, False),
        (lambda y: y > 0, False),
    ],
)
def test_what_is_whole_is_not_truncated(function, truncated):
    x = rows(FULL, 0, (3, C)) * 5
    cast = lambda x: (function(x).to(torch.int8), x.amax(-1))  # noqa: E731
    assert ("trunc" in [step.op for step in check(cast, x).program.steps]) == truncated


def test_rows_of_any_number(nothing_compiled):
    run = torch.compile(int8, backend="graphfuse", dynamic=True, fullgraph=True, options={"then": "aot_eager"})
    for count in (3, 7, 12):
        x = rows(HALF, count, (count, C))
        for one, other in zip(run(x), int8(x), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda x: (x.round().to(torch.int8).to(torch.uint8), x.amax(-1)), "a cast of torch.int8 to torch.uint8"),
        (lambda x: (-x.round().to(torch.int8)).float() + x.amax(-1, keepdim=True), "neg.default makes torch.int8"),
    ],
)
def test_integers_are_not_computed_with(function, why):
    """torch's wrap around."""
    module, _ = recorded(function, [rows(FULL)], "aten")
    translation = TranslatedGraph()
    for node in module.graph.nodes:
        translation.add(node)
    assert why in translation.why.values()


def test_gradients_pass_by_integers():
    """A scale's is its own; by a straight-through estimator that of what is quantized is one."""

    def estimated(x):
        return x + (again(x) - x).detach() + int8(x)[1].to(x.dtype)

    x, grad = given(), rows(HALF, 6, (5, C))
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    run = torch.compile(estimated, backend="graphfuse", fullgraph=True, options={"then": "aot_eager"})
    run(one).backward(grad)
    estimated(other).backward(grad)
    torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-2)
