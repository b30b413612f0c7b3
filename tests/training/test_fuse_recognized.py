"""Which modules are norms that an operator computes, by their forward, and which calls of them it computes."""

import pytest
import torch
from torch.nn import functional as F

import graphfuse
from graphfuse.torch import fuse
from graphfuse.torch.fusion.form import Form
from graphfuse.torch.fusion.module import NormModule, Refused, recognized
from support.norm_modules import HALF, HIDDEN, GatedNorm, LlamaNorm

pytestmark = pytest.mark.torch


class Counting(LlamaNorm):
    def forward(self, hidden_states):
        return (super().forward(hidden_states), 1)


class Columns(LlamaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.variance_epsilon)


class RootNorm(LlamaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon).to(x.dtype)


class TwiceNorm(LlamaNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states * 2)


class Unnamed(LlamaNorm):
    """A norm by what it computes."""


class Activation(torch.nn.Module):
    def forward(self, x):
        return F.gelu(x)


REFUSED = [
    (lambda: GatedNorm(), "no operator computes RMSNorm, rounded * (w), and mul behind it"),
    (lambda: Counting(), None),
    (lambda: RootNorm(), "it rounds the inverse root; no operator rounds there"),
    (lambda: TwiceNorm(), "it normalizes or scales by something else than its input and its parameters"),
    (lambda: torch.nn.LayerNorm((4, 16)), "its parameters are not vectors of one length"),
    (lambda: graphfuse.torch.RMSNorm(HIDDEN), "it is graphfuse's"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_refused(make, why):
    found = recognized(make())
    if why is None:  # not called a norm
        assert found is None
    else:
        assert isinstance(found, Refused) and found.reason == why


def test_found_by_what_it_computes():
    found = recognized(Unnamed())
    assert found == NormModule(
        Form("rms", "w", rounded=True), (("weight", "weight"),), "variance_epsilon", 1e-6, True, False
    )
    assert recognized(Activation()) is None and recognized(torch.nn.BatchNorm1d(4)) is None


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_a_norm_without_weights_of_any_width(norm):
    model = torch.nn.Sequential(norm(48, elementwise_affine=False))
    x = torch.randn(5, 48)
    want = model(x)
    assert len(fuse(model).replaced) == 1
    torch.testing.assert_close(model(x), want)


class Groups(LlamaNorm):
    def forward(self, x):
        wide = x.float().unflatten(-1, (4, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.flatten(-2).to(x.dtype)


class Switched(LlamaNorm):
    def __init__(self):
        super().__init__()
        self.on = True

    def forward(self, x):
        return super().forward(x) if self.on else x


class ByNumber(LlamaNorm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(2, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("norm", [Groups, Switched, ByNumber])
@pytest.mark.parametrize("shape", [(2, 3, HIDDEN), (2, 3, HIDDEN, HIDDEN)])
def test_norms_that_are_plain_in_some_calls_alone(norm, shape):
    model, x = norm(), torch.randn(shape)
    want = model(x)
    assert fuse(model).replaced
    torch.testing.assert_close(model(x), want)
    if norm is Switched:
        model.on = False
        assert model(x) is x


def test_a_sum_before_a_norm_of_groups_stays():
    norm = Groups()

    def total(x, r):
        s = x + r
        return norm(s), s

    x, r = (torch.randn(2, 3, HIDDEN, dtype=HALF) for _ in range(2))
    with torch.no_grad():
        made = torch.compile(total, backend="graphfuse", options={"then": "eager"})(x, r)
    for got, want in zip(made, total(x, r), strict=True):
        torch.testing.assert_close(got, want)


class WritingNorm(LlamaNorm):
    def forward(self, x):
        y = super().forward(x)
        y[..., 0] = 0
        return y


class DroppingNorm(LlamaNorm):
    def forward(self, x):
        return F.dropout(LlamaNorm.forward(self, x), 0.5, self.training)


class WrappedNorm(LlamaNorm):
    forward = torch.no_grad()(DroppingNorm.forward)


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (WritingNorm, "line 3 changes y[..., 0]"),
        (DroppingNorm, "line 2 calls F.dropout, which is not known to do the same each time"),
        (WrappedNorm, "its forward is not straight: "),  # what no_grad makes of it differs between versions of torch
    ],
)
def test_norms_that_do_more(norm, why):
    model = norm().eval()
    (entry,) = fuse(model).left
    assert why in entry.why


def test_a_class_that_has_only_the_name():
    """Of a known class, changed."""
    cls = type("LlamaRMSNorm", (LlamaNorm,), {"__module__": "transformers.models.llama.modeling_llama"})
    assert isinstance(recognized(cls()), NormModule)

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).to(hidden_states.dtype)

    cls.forward = forward
    assert recognized(cls()).reason == (
        "LlamaRMSNorm is known to compute RMSNorm, rounded * (w), and computes RMSNorm * (1 + w)"
    )
    cls.forward = lambda self, x: F.rms_norm(x, (HIDDEN,), self.weight, 3e-3)
    assert "is known to compute" in recognized(cls()).reason
