"""L2 normalization with gradients: values, rows shorter than eps, kernels, torch's machinery."""

import pytest
import torch

from graphfuse.torch import normalize

pytestmark = pytest.mark.torch

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
EPS = 0.25


def drawn(shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    """Every third row is far shorter than EPS, of more than three one is 0."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = x.reshape(-1, shape[-1])
    rows[2::3] *= 1e-3
    rows[3:4] = 0
    return x.to(dtype).requires_grad_()


def check(x: torch.Tensor, outer: torch.Tensor, eps: float = EPS) -> None:
    y = normalize(x, eps)
    (got,) = torch.autograd.grad(y, x, outer)
    wide = x.detach().double().requires_grad_()
    want = torch.nn.functional.normalize(wide, dim=-1, eps=eps)
    (gradient,) = torch.autograd.grad(want, wide, outer.double())
    for a, b in ((y, want), (got, gradient)):
        assert a.dtype is x.dtype and a.shape == x.shape
        unit, scale = torch.finfo(a.dtype).eps, max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=2e-6 * scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 3, 17), (5, 1), (0, 8), (3, 3000)], ids=str)
def test_values(shape, dtype):
    for seed in range(2):
        check(drawn(shape, dtype, seed), drawn(shape, dtype, seed + 7).detach())


def test_strides():
    x, outer = drawn((6, 5, 16)), drawn((6, 5, 16), seed=1).detach()
    check(x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(), outer)
    check(x, torch.ones(()).expand(6, 5, 16))
    check(x, outer.mT.contiguous().mT)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda x: normalize(x, EPS), (drawn((5, 6), torch.float64) + 1,))


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_one_kernel_each_way_on_the_emulator(dtype, kernels):
    check(drawn((27, 72), dtype), drawn((27, 72), dtype, 1).detach())
    operator = "differentiable_normalize"
    assert kernels == {f"{operator}_training": [True], f"{operator}_backward": [True]}


def test_opcheck():
    packet = lambda suffix: getattr(torch.ops.graphfuse, f"differentiable_normalize{suffix}").default  # noqa: E731
    x = drawn((4, 64)).detach()
    y, *kept = packet("_training")(x, EPS)
    for suffix, given in (("", (x, EPS)), ("_training", (x, EPS)), ("_backward", (y, x, *kept, EPS, True))):
        assert set(torch.library.opcheck(packet(suffix), given).values()) == {"SUCCESS"}
