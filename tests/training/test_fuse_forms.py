"""Layers that change tensors in place, or take more positions than they use: what stands around is fused."""

import copy

import pytest
import torch

from graphfuse.torch import fuse
from support.summing_layers import COLUMNS, Layer, drawn, made

pytestmark = pytest.mark.torch


class InPlace(Layer):
    """As Gemma 4's, with a tensor that has two names."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden_states):
        count = 1
        count += 1
        residual = hidden_states
        hidden_states = self.norm(self.linear(hidden_states))
        hidden_states = residual + hidden_states
        kept = hidden_states
        hidden_states *= self.scale
        hidden_states += residual
        hidden_states /= count
        return self.norm(hidden_states) + kept


class ChangesItsArgument(Layer):
    def forward(self, x):
        y = self.linear(x)
        x -= 1.0
        total = x + y
        return self.norm(total) + total


@pytest.mark.parametrize("cls", [InPlace, ChangesItsArgument])
def test_tensors_that_are_changed_in_place(cls):
    layer, own = made(cls), made(cls)
    report = str(fuse(layer))
    assert "layernorm, add" in report or "add, layernorm" in report
    x, same = drawn(2, 3, COLUMNS), drawn(2, 3, COLUMNS)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), own(same))
    torch.testing.assert_close(x, same, rtol=0, atol=0)
    if cls is ChangesItsArgument:  # which the linear layer has kept for its gradient
        for one in (layer, own):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one(drawn(2, 3, COLUMNS).requires_grad_() * 1).sum().backward()
        return
    grads = []
    for one in (layer, own):
        leaf = drawn(2, 3, COLUMNS).requires_grad_()
        (made_of := one(leaf * 1)).mul(drawn(*made_of.shape)).sum().backward()
        grads.append((leaf.grad, one.linear.weight.grad, one.norm.weight.grad))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _sums_with_a_name_that_is_kept(self, x):
    y = self.linear(x)
    kept = y
    y += x
    return self.norm(y) + kept


def test_a_sum_in_place_is_no_new_tensor():
    layer, x = made(type("Other", (Layer,), {"forward": _sums_with_a_name_that_is_kept})), drawn(2, 3, COLUMNS)
    own = copy.deepcopy(layer)
    fuse(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), own(x))


class MorePositions(Layer):
    """As HunyuanVideo's blocks."""

    def forward(self, x, scale=None, *args, **kwargs):
        y = self.linear(x) if scale is None else self.linear(x + 1)
        total = x + y
        return self.norm(total) + len(args)


def test_more_positions_run_the_own_forward():
    layer, own, x = made(MorePositions), made(MorePositions), drawn(2, 3, COLUMNS)
    assert "add, layernorm" in str(fuse(layer))
    with torch.no_grad():
        for given in ((x,), (x, None), (x, 2.0), (x, None, 1, 2)):
            torch.testing.assert_close(layer(*given), own(*given))
        torch.testing.assert_close(layer(x, other=3), own(x, other=3))
