"""cross_entropy and its gradient as functions: values, calls like earlier ones, in place, refusals, operators."""

import pytest
import torch

from graphfuse import VariantPackError, VariantPackTypeError, functional
from graphfuse.functional import cross_entropy, cross_entropy_backward

KINDS = {"smoothing": {"label_smoothing": 0.1}, "ignored": {"ignore_index": 7}, "plain": {}}


@pytest.fixture(autouse=True, params=["cpu", "emulator"])
def device(request, plan_on):
    plan_on(request.param)


pytestmark = pytest.mark.emulate


def drawn(shape=(6, 100), dtype=torch.bfloat16, integers=torch.int64, seed=0):
    source = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=source) * 3).to(dtype)
    return x, torch.randint(shape[-1], shape[:-1], generator=source).to(integers)


def exact(x, target, z_loss=0.0, **options):
    """(loss, logsumexp, gradient of the sum of losses), in float64 by torch."""
    leaf = x.double().detach().requires_grad_()
    rows, numbers = leaf.reshape(-1, x.shape[-1]), target.reshape(-1).long()
    loss = torch.nn.functional.cross_entropy(rows, numbers, reduction="none", **options)
    logsumexp = rows.logsumexp(1)
    counted = numbers != options.get("ignore_index", -100)
    loss = loss + z_loss * torch.where(counted, logsumexp.square(), 0)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach().reshape(target.shape), logsumexp.detach().reshape(target.shape), gradient


def hold(x, target, **options):
    loss, logsumexp, gradient = exact(x, target, **options)
    made = cross_entropy(x, target, **options)
    for got, want in zip(made, (loss, logsumexp), strict=True):
        assert got.dtype is torch.float32 and got.shape == target.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=3e-6)
    dinput = cross_entropy_backward(x, target, made[1], torch.ones_like(made[0]), **options)
    assert dinput.dtype is x.dtype
    spread = {"rtol": 8e-3, "atol": 1e-6} if x.dtype is torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(dinput.double(), gradient, **spread)


@pytest.mark.parametrize("shape", [(6, 100), (2, 3, 100), (100,), (5, 1), (3, 2000), (0, 8)], ids=str)
def test_values(shape):
    hold(*drawn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("options", [*KINDS.values(), {"z_loss": 1e-3, "label_smoothing": 1}], ids=str)
def test_types_and_options(dtype, integers, options):
    x, target = drawn((6, 100), dtype, integers)
    target[2] = options.get("ignore_index", -100)
    hold(x, target, **options)


def test_later_calls_are_told_apart():
    """By rows, layouts and each number, in any order."""
    for turn in range(2):
        for rows in (6, 3, 40):
            hold(*drawn((rows, 100), seed=rows + turn))
        for options in KINDS.values():
            x, target = drawn(seed=turn)
            target[0] = 7
            hold(x, target, **options)
        apart = torch.zeros(6, 128).bfloat16()[:, :100].copy_(drawn()[0])
        hold(apart, drawn()[1])
        hold(drawn()[0], drawn((6, 100))[1].repeat_interleave(2)[::2])


def test_a_later_call_takes_the_fast_path():
    x, target = drawn()
    first = cross_entropy(x, target)
    fast = cross_entropy.last()
    again = fast(x, target, -100, 0.0, 0.0, None, None, None)
    assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_tensors_that_are_given_are_written():
    x, target = drawn()
    loss, logsumexp = torch.empty(6), torch.empty(6)
    made = cross_entropy(x, target, loss=loss, logsumexp=logsumexp)
    assert made[0] is loss and made[1] is logsumexp
    assert torch.equal(loss, cross_entropy(x, target)[0])
    grad = torch.randn(6)
    apart = cross_entropy_backward(x, target, logsumexp, grad)
    version = x._version
    assert cross_entropy_backward(x, target, logsumexp, grad, dinput=x) is x
    assert torch.equal(x, apart) and x._version > version


X, TARGET = drawn()
REFUSED = {
    "a type of targets": (
        dict(target=TARGET.float()),
        VariantPackTypeError,
        "target is of torch.float32; accepted: int",
    ),
    "a shape of targets": (dict(target=TARGET[:5]), VariantPackError, r"target has shape \(5,\); accepted: \(6,\)"),
    "a type of logits": (dict(input=X.double()), VariantPackTypeError, "input is of torch.float64; accepted: bfloat16"),
    "an index": (dict(ignore_index=1.0), VariantPackTypeError, "ignore_index is float; accepted: int"),
    "a truth value": (dict(label_smoothing=True), VariantPackTypeError, "label_smoothing is bool; accepted: float or"),
    "too much smoothing": (dict(label_smoothing=1.5), VariantPackError, "label_smoothing is 1.5; accepted: 0 to 1"),
    "an index beyond": (dict(ignore_index=2**24), VariantPackError, "ignore_index is 16777216; accepted: magnitudes"),
    "no number": (dict(z_loss=float("nan")), VariantPackError, "z_loss is nan; accepted: 0 and finite numbers above"),
    "no columns": (dict(input=X[:, :0]), VariantPackError, r"input has shape \(6, 0\)"),
}


@pytest.mark.parametrize("change, error, said", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(change, error, said):
    with pytest.raises(error, match=said):
        cross_entropy(**{"input": X, "target": TARGET} | change)


def test_a_gradient_beside_the_logits_is_refused():
    x, target = drawn((6, 104))
    memory = torch.zeros(7, 104).bfloat16()
    with pytest.raises(VariantPackError, match="output 'dinput' overlaps 'input'"):
        cross_entropy_backward(memory[:6].copy_(x), target, torch.zeros(6), torch.zeros(6), dinput=memory[1:])


def test_a_watched_tensor_is_not_written():
    x, target = drawn(dtype=torch.float32)
    with pytest.raises(VariantPackError, match="dinput"):
        cross_entropy_backward(x, target, torch.zeros(6), torch.zeros(6), dinput=x.clone().requires_grad_())


def test_as_operators():
    x, target = drawn()
    sums, grad = cross_entropy(x, target)[1], torch.ones(6)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.graphfuse
    for operator, arguments in (
        (ops.cross_entropy.default, (x, target)),
        (ops.cross_entropy.default, (x, target, 3, 0.1, 1e-3)),
        (ops.cross_entropy_backward.default, (x, target, sums, grad)),
    ):
        assert set(torch.library.opcheck(operator, arguments, {}, test_utils=checks).values()) == {"SUCCESS"}


def test_under_torch_compile():
    compiled = torch.compile(
        lambda x, t: functional.cross_entropy(x, t, ignore_index=3)[0], fullgraph=True, backend="eager"
    )
    for rows in (6, 9):
        x, target = drawn((rows, 100))
        assert torch.equal(compiled(x, target), cross_entropy(x, target, ignore_index=3)[0])
