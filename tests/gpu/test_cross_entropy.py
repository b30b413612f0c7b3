"""Cross entropy on the GPU at sizes of vocabularies, against torch in float64, and its gradient in place."""

import pytest
import torch

from graphfuse import functional
from graphfuse.torch import CrossEntropyLoss

pytestmark = pytest.mark.gpu


def drawn(rows: int, columns: int, dtype: torch.dtype):
    source = torch.Generator("cuda").manual_seed(columns)
    x = (torch.randn(rows, columns, generator=source, device="cuda") * 3).to(dtype)
    target = torch.randint(columns, (rows,), generator=source, device="cuda")
    target[1::5] = -100
    return x, target


@pytest.mark.parametrize("columns", [1, 7, 1000, 32000, 50257, 128256, 262144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_gradients(columns, dtype):
    x, target = drawn(40, columns, dtype)
    leaf = x.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(leaf, target, label_smoothing=0.1, reduction="none")
    wanted.sum().backward()
    loss, sums = functional.cross_entropy(x, target, label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(sums.double(), leaf.detach().logsumexp(1), rtol=1e-6, atol=1e-6)
    made = functional.cross_entropy_backward(x, target, sums, torch.ones_like(loss), label_smoothing=0.1)
    rtol = 8e-3 if dtype is torch.bfloat16 else 3e-5
    torch.testing.assert_close(made.double(), leaf.grad, rtol=rtol, atol=1e-7)
    functional.cross_entropy_backward(x, target, sums, torch.ones_like(loss), label_smoothing=0.1, dinput=x)
    assert torch.equal(x, made)


def test_a_target_beyond_the_classes_is_nan_and_reads_nothing():
    x, target = drawn(8, 1000, torch.bfloat16)
    target[:] = torch.tensor([0, 1000, -1, 2**32 + 3, 2**63 - 1, -(2**63), -100, 999], device="cuda")
    loss, sums = functional.cross_entropy(x, target)
    assert loss.isnan().tolist() == [False, True, True, True, True, True, False, False]
    made = functional.cross_entropy_backward(x, target, sums, torch.ones_like(loss))
    assert torch.equal(made.isnan().all(1), loss.isnan()) and torch.equal(made.isnan().any(1), loss.isnan())


def test_as_a_module():
    x, target = drawn(64, 32000, torch.bfloat16)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    loss, wanted = CrossEntropyLoss()(ours, target), torch.nn.CrossEntropyLoss()(theirs, target)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    loss.backward(), wanted.backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=8e-3, atol=1e-9)
