"""Softmax and its logarithm with gradients: values, what is kept, torch's machinery around them."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from graphfuse import GraphNotSupportedError, VariantPackError, VariantPackTypeError
from graphfuse import torch as training

pytestmark = pytest.mark.torch

FUNCTIONS = {"softmax": training.softmax, "log_softmax": training.log_softmax}
TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(64,), (1, 64), (5, 64), (2, 3, 48), (2, 1, 3, 17), (7, 1), (0, 64), (3, 0, 8)]


def drawn(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(name: str, x: torch.Tensor, outer: torch.Tensor) -> None:
    """Result and gradient against float64; the gradient is that of the result as it was rounded."""
    x = x.detach().requires_grad_()
    y = FUNCTIONS[name](x)
    (got,) = torch.autograd.grad(y, x, outer)
    assert y.dtype is got.dtype is x.dtype and got.shape == x.shape
    wide, unit = x.detach().double().requires_grad_(), torch.finfo(x.dtype).eps
    exact = getattr(torch, name)(wide, -1)
    error = 1e-6 if x.dtype is not torch.float64 else 1e-14
    torch.testing.assert_close(y.double(), exact, rtol=0.51 * unit + error, atol=error)
    made = y.detach().double()
    g = outer.double()
    if name == "softmax":
        wanted = made * (g - (g * made).sum(-1, keepdim=True))
    else:
        wanted = g - made.exp() * g.sum(-1, keepdim=True)
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted, rtol=0.51 * unit + error, atol=10 * error * scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, shape, dtype):
    for seed in range(2):  # the second time by fast paths
        check(name, drawn(shape, dtype, seed), drawn(shape, dtype, seed + 7))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides(name):
    x, outer = drawn((6, 5, 16)), drawn((6, 5, 16), seed=1)
    check(name, x.transpose(0, 1), outer.transpose(0, 1))
    check(name, x.mT.contiguous().mT, outer)
    check(name, x, outer.mT.contiguous().mT)
    check(name, x, torch.ones(()).expand(6, 5, 16))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    x = drawn((3, 6), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(FUNCTIONS[name], (x,))


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_on_the_emulator(name, dtype, kernels):
    """One kernel forward and one backward, whose results these are."""
    check(name, drawn((27, 72), dtype), drawn((27, 72), dtype, 1))
    operator = f"differentiable_{name}"
    assert kernels == {f"{operator}_training": [True], f"{operator}_backward": [True]}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_result_is_all_that_is_kept(name):
    found, x = [], drawn((5, 64)).requires_grad_()
    with saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        y = FUNCTIONS[name](x)
    assert [t.data_ptr() for t in found] == [y.data_ptr()]
    y = FUNCTIONS[name](x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_gradients_nothing_is_kept(name):
    x = drawn((5, 64))
    trained = FUNCTIONS[name](x.clone().requires_grad_())
    with torch.no_grad():
        plain = FUNCTIONS[name](x.clone().requires_grad_())
    assert trained.requires_grad and not plain.requires_grad and torch.equal(trained, plain)
    assert not FUNCTIONS[name](x).requires_grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_opcheck(name):
    packet = lambda suffix: getattr(torch.ops.graphfuse, f"differentiable_{name}{suffix}").default  # noqa: E731
    x = drawn((4, 64))
    y = FUNCTIONS[name](x)
    cases = [("", (x,)), ("", (x.clone().requires_grad_(),)), ("_training", (x,)), ("_backward", (x, y, True))]
    for suffix, arguments in cases:
        assert set(torch.library.opcheck(packet(suffix), arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_each_way_for_all_row_counts(name):
    torch._dynamo.reset()
    fast = torch.compile(lambda x: FUNCTIONS[name](x * 2).sin(), fullgraph=True, dynamic=True, backend="aot_eager")
    for n, rows in enumerate((5, 7, 3, 129)):
        x = drawn((rows, 4, 16), seed=n).requires_grad_()
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            y = fast(x)
        outer = drawn(y.shape, seed=9)
        want = FUNCTIONS[name](x * 2).sin()
        assert torch.equal(y, want)
        assert torch.equal(*(torch.autograd.grad(z, x, outer)[0] for z in (y, want)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpoint(name):
    x, outer = drawn((5, 64)).requires_grad_(), drawn((5, 64), seed=1)
    (want,) = torch.autograd.grad(FUNCTIONS[name](x), x, outer)
    (got,) = torch.autograd.grad(checkpoint(FUNCTIONS[name], x, use_reentrant=False), x, outer)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_refused(name):
    with pytest.raises(VariantPackTypeError, match="x must be a torch tensor, got list"):
        FUNCTIONS[name]([1.0])
    with pytest.raises(VariantPackTypeError, match="x is of torch.int64; accepted: bfloat16"):
        FUNCTIONS[name](torch.ones(4, 4, dtype=torch.int64))
    with pytest.raises(VariantPackError, match=r"x has shape \(\); accepted: one dimension or more"):
        FUNCTIONS[name](torch.tensor(1.0))
    x = drawn((5, 8)).requires_grad_()
    (first,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match=f"differentiable_{name}: its gradient has no derivative"):
        first.sum().backward()
    with pytest.raises(GraphNotSupportedError, match="torch.func"):
        torch.func.grad(lambda t: FUNCTIONS[name](t).sum())(x.detach())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_infinities_are_as_of_torch(name):
    x = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf] * 3, [0.0, torch.inf, 1.0]])
    torch.testing.assert_close(FUNCTIONS[name](x), getattr(torch, name)(x, -1), equal_nan=True)
