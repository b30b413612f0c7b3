"""Adaptive layer norm with gradients: values, which gradients are made, how many kernels, torch's machinery."""

import pytest
import torch

from graphfuse import VariantPackError
from graphfuse.torch import ada_layer_norm

pytestmark = pytest.mark.torch

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [  # of x, and of scale and shift
    ((3, 5, 48), (3, 1, 48)),
    ((3, 5, 48), (48,)),
    ((3, 5, 48), (1, 1, 48)),
    ((3, 5, 48), (3, 5, 48)),
    ((2, 3, 4, 17), (2, 1, 1, 17)),
    ((4, 64), (4, 64)),
    ((64,), (64,)),
    ((1, 7, 64), (1, 1, 64)),
    ((3, 0, 16), (3, 1, 16)),
]


def drawn(shapes, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    """x, scale and shift."""
    source = torch.Generator().manual_seed(seed)
    shapes = (shapes[0], shapes[1], shapes[1])
    return [torch.randn(s, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def exact(x, scale, shift, eps=1e-6):
    apart = x - x.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + scale) + shift


def check(given: list[torch.Tensor], outer: torch.Tensor) -> None:
    y = ada_layer_norm(*given)
    asked = [t for t in given if t.requires_grad]
    got = torch.autograd.grad(y, asked, outer)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    want = exact(*wide)
    gradients = torch.autograd.grad(want, [t for t in wide if t.requires_grad], outer.double())
    for a, b, of in zip((y, *got), (want, *gradients), (given[0], *asked), strict=True):
        assert a.dtype is of.dtype and a.shape == of.shape
        unit, scale = torch.finfo(a.dtype).eps, max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values(shapes, dtype):
    for seed in range(2):  # the second time by fast paths
        check(drawn(shapes, dtype, seed), drawn(shapes, dtype, seed + 7)[0].detach())


def test_types_and_strides():
    x, scale, shift = drawn(((3, 5, 48), (3, 1, 48)), torch.bfloat16)
    outer = drawn(((3, 5, 48), (1,)), torch.bfloat16, 3)[0].detach()
    check([x, scale.detach().float().requires_grad_(), shift.detach().half().requires_grad_()], outer)
    chunks = torch.randn(3, 6, 48).bfloat16().chunk(6, 1)  # as of an embedding
    check([x, *(t.requires_grad_() for t in chunks[2:4])], outer)
    check([x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(), scale, shift], outer)
    check([x, scale, shift], outer[:1, :1, :1].expand(3, 5, 48))


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES[:4], ids=str)
def test_gradients_that_nobody_asks_for_are_not_made(shapes, asked):
    given = drawn(shapes)
    for n, t in enumerate(given):
        t.requires_grad_(n in asked)
    check(given, drawn(shapes, seed=5)[0].detach())


@pytest.mark.parametrize("shapes", [((2, 3, 6), (2, 1, 6)), ((2, 3, 6), (6,)), ((2, 3, 6), (2, 3, 6))], ids=str)
def test_gradcheck(shapes):
    assert torch.autograd.gradcheck(ada_layer_norm, drawn(shapes, torch.float64))


@pytest.mark.emulate
@pytest.mark.parametrize("shapes", [((3, 9, 72), (72,)), ((3, 9, 72), (3, 1, 72)), ((1, 9, 72), (1, 1, 72))], ids=str)
def test_kernels_on_the_emulator(shapes, kernels):
    """One each way, and of several samples another for the sums over the rows of each, of scale and of shift."""
    check(drawn(shapes, torch.bfloat16), drawn(shapes, torch.bfloat16, 1)[0].detach())
    assert kernels["ada_layer_norm_training"] == [True]
    assert kernels["ada_layer_norm_backward"] == [True] * (3 if shapes[1][0] == 3 else 1)


def test_opcheck():
    x, scale, shift = (t.detach() for t in drawn(((3, 4, 64), (3, 1, 64))))
    packet = lambda suffix: getattr(torch.ops.graphfuse, f"ada_layer_norm{suffix}").default  # noqa: E731
    y, mean, inverse = packet("_training")(x, scale, shift, 1e-6)
    cases = [("", (x, scale, shift, 1e-6)), ("", (*drawn(((3, 4, 64), (3, 1, 64))), 1e-6))]
    cases += [("_training", (x, scale, shift, 1e-6)), ("_backward", (y, x, scale, mean, inverse, True, True, True))]
    for suffix, arguments in cases:
        assert set(torch.library.opcheck(packet(suffix), arguments).values()) == {"SUCCESS"}


def test_compiled():
    torch._dynamo.reset()
    fast = torch.compile(ada_layer_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 7):
        given = drawn(((3, rows, 48), (3, 1, 48)))
        made, want = fast(*given), ada_layer_norm(*given)
        outer = torch.randn(made.shape)
        assert torch.equal(made, want)
        for a, b in zip(*(torch.autograd.grad(y, given, outer) for y in (made, want)), strict=True):
            assert torch.equal(a, b)


def test_shapes_that_do_not_fit_are_refused():
    x, scale, shift = drawn(((3, 5, 48), (3, 1, 48)))
    with pytest.raises(VariantPackError, match=r"scale has shape \(3, 48\); accepted: \(3, 1, 48\) or \(48,\) or"):
        ada_layer_norm(x, scale[:, 0], shift[:, 0])
    with pytest.raises(VariantPackError, match=r"shift has shape \(48,\); accepted: \(3, 1, 48\)"):
        ada_layer_norm(x, scale, shift[0, 0])
