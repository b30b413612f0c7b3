"""Cross entropy under autograd: values and gradients as torch's, reductions, operators, what is refused."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, VariantPackError, VariantPackTypeError
from graphfuse.torch import CrossEntropyLoss, cross_entropy

pytestmark = pytest.mark.emulate


@pytest.fixture(autouse=True, params=["cpu", "emulator"])
def device(request, plan_on):
    plan_on(request.param)


def drawn(shape=(6, 100), dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=source) * 3).to(dtype).requires_grad_()
    target = torch.randint(shape[-1], shape[:-1], generator=source)
    return x, target


def theirs(x, target, reduction="mean", z_loss=0.0, **options):
    """Torch's, in float64, and its gradient with respect to x, weighted if it is not reduced."""
    leaf = x.detach().double().requires_grad_()
    rows, numbers = leaf.flatten(0, -2) if leaf.dim() > 1 else leaf[None], target.reshape(-1).long()
    loss = torch.nn.functional.cross_entropy(rows, numbers, reduction="none", **options)
    counted = numbers != options.get("ignore_index", -100)
    loss = loss + z_loss * torch.where(counted, rows.logsumexp(1).square(), 0)
    loss = {"none": loss.reshape(target.shape), "sum": loss.sum(), "mean": loss.sum() / counted.sum()}[reduction]
    weights = torch.arange(1, loss.numel() + 1, dtype=torch.float64).reshape(loss.shape)
    loss.backward(weights)
    return loss.detach(), leaf.grad, weights


def hold(x, target, **options):
    loss = cross_entropy(x, target, **options)
    wanted, gradient, weights = theirs(x, target, **options)
    assert loss.dtype is (torch.float64 if x.dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=2e-6, atol=2e-6)
    x.grad = None
    loss.backward(weights.to(loss.dtype))
    assert x.grad.dtype is x.dtype
    rtol = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(x.dtype, 2e-5)
    torch.testing.assert_close(x.grad.double(), gradient, rtol=rtol, atol=1e-7 if x.dtype is torch.float32 else 1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"ignore_index": 3, "label_smoothing": 0.1}, {"z_loss": 1e-3}], ids=str)
def test_values_and_gradients(reduction, dtype, options):
    x, target = drawn(dtype=dtype)
    target[1::2] = options.get("ignore_index", -100)
    hold(x, target, reduction=reduction, **options)


@pytest.mark.parametrize("shape", [(2, 3, 50), (50,), (4, 1), (3, 2000)], ids=str)
def test_shapes(shape):
    hold(*drawn(shape))
    hold(*drawn(shape, seed=1))


def test_all_rows_ignored():
    x, target = drawn()
    loss = cross_entropy(x, target.fill_(-100))
    assert loss.isnan()  # as torch's
    cross_entropy(x, target, reduction="sum").backward()
    assert not x.grad.any()


def test_a_module_in_the_place_of_torchs():
    theirs_, ours = (
        kind(ignore_index=5, label_smoothing=0.2, reduction="sum")
        for kind in (torch.nn.CrossEntropyLoss, CrossEntropyLoss)
    )
    x, target = drawn()
    target[0] = 5
    assert isinstance(ours, torch.nn.CrossEntropyLoss) and ours.state_dict() == theirs_.state_dict()
    torch.testing.assert_close(ours(x, target), theirs_(x, target), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(CrossEntropyLoss()(x, target), torch.nn.CrossEntropyLoss()(x, target))


def test_without_a_gradient_nothing_is_kept():
    x, target = drawn()
    with torch.no_grad():
        assert cross_entropy(x, target).grad_fn is None
    assert cross_entropy(x.detach(), target).grad_fn is None
    assert "cross_entropy_loss" in type(cross_entropy(x, target, reduction="none").grad_fn).__name__


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 2}], ids=str)
def test_gradcheck(options):
    x, target = drawn((4, 9), torch.float64)
    target[0] = 2
    run = lambda x: cross_entropy(x, target, reduction="none", **options)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x,))


def test_the_operator():
    x, target = drawn()
    options = (-100, 0.1, 0.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.graphfuse.cross_entropy_loss.default
    for given in (x, x.detach()):
        found = torch.library.opcheck(operator, (given, target, *options), {}, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}


def test_under_torch_compile():
    x, target = drawn()
    module = CrossEntropyLoss(label_smoothing=0.1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss = compiled(x, target)
    loss.backward()
    made, x.grad = x.grad, None
    module(x, target).backward()
    assert torch.equal(loss, module(x, target)) and torch.equal(made, x.grad)


def test_a_gradient_is_differentiated_once():
    x, target = drawn()
    (made,) = torch.autograd.grad(cross_entropy(x, target, reduction="sum"), x, create_graph=True)
    x.grad = None
    cross_entropy(x, target, reduction="sum").backward()
    assert torch.equal(made.detach(), x.grad)
    with pytest.raises(GraphNotSupportedError, match="cross_entropy_loss: its gradient has no derivative"):
        made.sum().backward()


def test_other_derivatives_are_refused():
    x, target = drawn()
    with pytest.raises(GraphNotSupportedError, match="differentiated by torch.func"):
        torch.func.grad(lambda x: cross_entropy(x, target))(x.detach())
    with pytest.raises(GraphNotSupportedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: cross_entropy(x, target), (x.detach(),), (torch.ones_like(x),))


@pytest.mark.parametrize(
    "change, error, said",
    [
        (dict(reduction="max"), VariantPackError, "reduction is 'max'; accepted: 'mean', 'sum', 'none'"),
        (dict(label_smoothing=2.0), VariantPackError, "label_smoothing is 2.0; accepted: 0 to 1"),
        (dict(target=torch.rand(6, 100)), VariantPackTypeError, "target is of torch.float32; accepted: int64, int32"),
        (dict(target=torch.zeros(5).long()), VariantPackError, r"target has shape \(5,\); accepted: \(6,\)"),
    ],
)
def test_what_is_refused(change, error, said):
    x, target = drawn()
    for given in (x, x.detach()):
        with pytest.raises(error, match=said):
            cross_entropy(**{"input": given, "target": target} | change)


def test_weights_of_classes_are_refused():
    with pytest.raises(VariantPackError, match="weight is a Tensor; accepted: None"):
        CrossEntropyLoss(torch.ones(3))
    with pytest.raises(VariantPackError, match="reduction is 'max'"):
        CrossEntropyLoss(reduction="max")
