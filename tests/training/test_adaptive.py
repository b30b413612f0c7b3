"""Adaptive layer norm: values, which gradients are made, how many kernels, torch's machinery. After a gated residual
sum it is a region (`test_fusion_adaptive`)."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, VariantPackError
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


EPS = 1e-6


def exact(x, scale, shift):
    apart = x - x.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + scale) + shift


def drawn(shapes, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    """x, scale and shift."""
    source = torch.Generator().manual_seed(seed)
    of, modulation = shapes
    shapes = (of, modulation, modulation)
    return [torch.randn(s, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def like(y, seed=7) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(y.shape, generator=source, dtype=torch.float64).to(y.dtype)


def check(given: list[torch.Tensor], outer=like) -> None:
    """outer: the gradient of the result."""
    made, asked = ada_layer_norm(*given), [t for t in given if t.requires_grad]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    want, wide_asked = exact(*wide), [t for t in wide if t.requires_grad]
    assert made.requires_grad == want.requires_grad
    outer = outer(made)
    got = torch.autograd.grad(made, asked, outer)
    gradients = torch.autograd.grad(want, wide_asked, outer.double())
    for a, b, of in zip((made, *got), (want, *gradients), (given[0], *asked), strict=True):
        assert a.dtype is of.dtype and a.shape == of.shape
        unit, scale = torch.finfo(a.dtype).eps, max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values(shapes, dtype):
    for seed in range(2):  # the second time by fast paths
        check(drawn(shapes, dtype, seed))


def test_types_and_strides():
    x, scale, shift = given = drawn(((3, 5, 48), (3, 1, 48)), torch.bfloat16)
    check([x, scale.detach().float().requires_grad_(), shift.detach().half().requires_grad_()])
    chunks = torch.randn(3, 6, 48).bfloat16().chunk(6, 1)  # as of an embedding
    check([x, *(t.requires_grad_() for t in chunks[2:4])])
    check([x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(), scale, shift])
    check(given, lambda made: like(made)[:1, :1, :1].expand(3, 5, 48))


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES[:4], ids=str)
def test_gradients_that_nobody_asks_for_are_not_made(shapes, asked):
    given = drawn(shapes)
    for n, t in enumerate(given):
        t.requires_grad_(n in asked)
    check(given)


@pytest.mark.parametrize("shapes", [((2, 3, 6), (2, 1, 6)), ((2, 3, 6), (6,)), ((2, 3, 6), (2, 3, 6))], ids=str)
def test_gradcheck(shapes):
    assert torch.autograd.gradcheck(ada_layer_norm, drawn(shapes, torch.float64))


@pytest.mark.emulate
@pytest.mark.parametrize("shapes", [((3, 9, 72), (72,)), ((3, 9, 72), (3, 1, 72)), ((1, 9, 72), (1, 1, 72))], ids=str)
def test_kernels_on_the_emulator(shapes, kernels):
    """One each way, and of several samples another for both sums over the rows of each."""
    check(drawn(shapes, torch.bfloat16))
    assert kernels["ada_layer_norm_training"] == [True]
    assert kernels["ada_layer_norm_backward"] == [True] * (2 if shapes[1][0] == 3 else 1)


def test_opcheck():
    packet = lambda suffix: getattr(torch.ops.graphfuse, f"ada_layer_norm{suffix}").default  # noqa: E731
    given = drawn(((3, 4, 64), (3, 1, 64)))
    x, scale, shift = plain = [t.detach() for t in given]
    dy, *statistics = packet("_training")(*plain, EPS)
    cases = [("", (*plain, EPS)), ("", (*given, EPS)), ("_training", (*plain, EPS))]
    for suffix, arguments in (*cases, ("_backward", (dy, x, scale, *statistics, True, True, True))):
        assert set(torch.library.opcheck(packet(suffix), arguments).values()) == {"SUCCESS"}


def test_compiled():
    torch._dynamo.reset()
    fast = torch.compile(ada_layer_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 7):
        given = drawn(((3, rows, 48), (3, 1, 48)))
        made, want = fast(*given), ada_layer_norm(*given)
        outer = like(made)
        assert torch.equal(made, want)
        for a, b in zip(*(torch.autograd.grad(y, given, outer) for y in (made, want)), strict=True):
            assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    given = drawn(SHAPES[0])
    first = torch.autograd.grad(ada_layer_norm(*given).sum(), given, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match="graphfuse::ada_layer_norm: its gradient has no derivative"):
        first[0].square().sum().backward()


def test_shapes_that_do_not_fit_are_refused():
    x, scale, shift = drawn(((3, 5, 48), (3, 1, 48)))
    with pytest.raises(VariantPackError, match=r"scale has shape \(3, 48\); accepted: \(3, 1, 48\) or \(48,\) or"):
        ada_layer_norm(x, scale[:, 0], shift[:, 0])
    with pytest.raises(VariantPackError, match=r"shift has shape \(48,\); accepted: \(3, 1, 48\)"):
        ada_layer_norm(x, scale, shift[0, 0])
