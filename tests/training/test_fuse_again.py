"""Repeated calls of fused modules: what they compare before the fast path of the last call runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse import GraphNotSupportedError
from graphfuse.torch import fuse
from graphfuse.torch.whole_models import fused_calls

pytestmark = pytest.mark.torch


class Norm(torch.nn.Module):
    def __init__(self, columns=24):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, columns))
        self.eps, self.scale = 1e-5, 1.0

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y * self.scale


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj = Norm(), torch.nn.Linear(24, 24)

    def forward(self, x, residual):
        residual = residual + x
        x = self.norm(residual)
        return self.proj(x), residual


@pytest.fixture
def ran(monkeypatch):
    """Repeated calls since, whose fast path ran."""
    calls, own = [], fused_calls.FusedCalls._again

    def again(*given):
        made = own(*given)

        def call(*values):
            found = made(*values)
            calls.extend([] if found is None else [found])
            return found

        return call

    monkeypatch.setattr(fused_calls.FusedCalls, "_again", again)
    monkeypatch.setattr(fused_calls, "_kept", fused_calls._kept.__class__(maxlen=64))
    return calls


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fused(x):
    """A fused norm whose calls with x are repeated ones, and one that is not fused."""
    norm = Norm()
    fuse(norm)
    with torch.no_grad():
        for _ in range(2):
            norm(x)
    return norm, Norm()


def test_a_repeated_call_takes_the_fast_path_of_the_last(ran, plan_on):
    plan_on("emulator")
    norm, own = fused(drawn(2, 3, 24))
    with torch.no_grad():
        for count in range(1, 5):
            x = drawn(2, count, 24, seed=count)
            torch.testing.assert_close(norm(x), own(x))
    assert len(ran) == 5


def _weight(norm):
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)


def _weight_of_another_type(norm):
    norm.weight = torch.nn.Parameter(norm.weight.detach().bfloat16())


def _weight_for_all(norm):
    norm.weight = torch.nn.Parameter(torch.full((1,), 3.0))


def _no_weight(norm):
    norm.weight = None
    norm.register_parameter("weight", None)
    norm.__dict__["weight"] = 2.0


def _eps(norm):
    norm.eps = 0.5


def _type_of_a_number(norm):
    norm.scale = 2


@pytest.mark.parametrize(
    "change", [_weight, _weight_of_another_type, _weight_for_all, _no_weight, _eps, _type_of_a_number]
)
def test_what_modules_have_is_compared(change, ran):
    x = drawn(2, 3, 24)
    norm, own = fused(x)
    change(norm)
    change(own)
    with torch.no_grad():
        made, want = norm(x), own(x)
    assert made.dtype is want.dtype
    torch.testing.assert_close(made, want)


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.double(),
        lambda x: x.bfloat16(),
        lambda x: x[0, 0],
        lambda x: x[:, :, ::2].repeat_interleave(2, -1).transpose(0, 1),
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :0],
        lambda x: torch.nn.Parameter(x),
        lambda x: torch._neg_view(x),
    ],
)
def test_what_is_given_is_compared(given, ran):
    norm, own = fused(drawn(2, 3, 24))
    x = given(drawn(2, 3, 24, seed=1))
    with torch.no_grad():
        made, want = norm(x), own(x)
    assert made.dtype is want.dtype and made.shape == want.shape
    close = {"rtol": 2e-2, "atol": 2e-2} if x.dtype is torch.bfloat16 else {}
    torch.testing.assert_close(made, want, **close)


def test_gradients_transforms_and_modes_see_the_call(ran):
    x = drawn(2, 3, 24)
    norm, own = fused(x)
    ran.clear()
    x.requires_grad_()
    made, want = (torch.autograd.grad(of(x).square().sum(), [x, of.weight]) for of in (norm, own))
    torch.testing.assert_close(made, want)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(norm)(x), own(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(norm(x), own(x))
        torch.testing.assert_close(torch.compile(norm, backend="eager", fullgraph=True)(x), own(x))
        torch.testing.assert_close(torch.jit.trace(norm, (x,), check_trace=False)(x * 2), own(x * 2))
    with forward_ad.dual_level(), pytest.raises(GraphNotSupportedError, match="forward-mode"):
        norm(forward_ad.make_dual(x.detach(), x.detach()))
    assert not ran


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_modes_of_torch_see_the_call(device, ran, plan_on):
    plan_on(device)
    x = drawn(2, 3, 24)
    norm, own = fused(x)
    ran.clear()
    with torch.no_grad():
        seen = make_fx(norm)(x)
        assert torch.ops.graphfuse.region.default in [node.target for node in seen.graph.nodes]
        torch.testing.assert_close(seen(x * 2), own(x * 2))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(norm(x), FakeTensor)
        assert not ran
        torch.testing.assert_close(norm(x), own(x))
    assert ran


class Like(Norm):
    """Reads the type of a tensor, and whether there is one, and of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("out", torch.ones(24))

    def forward(self, x, like):
        if like is None:
            return x
        return super().forward(x).to(like.dtype).to(self.out.dtype)


def test_what_no_kernel_reads_is_compared(ran):
    norm, own, x = Like(), Like(), drawn(2, 3, 24)
    fuse(norm)
    with torch.no_grad():
        for like in (x + 1, x + 1, x + 1, x.bfloat16(), None):
            made, want = norm(x, like), own(x, like)
            assert made.dtype is want.dtype
            torch.testing.assert_close(made, want)
        norm.out, own.out = norm.out.bfloat16(), own.out.bfloat16()
        assert norm(x, x + 1).dtype is own(x, x + 1).dtype


def test_calls_with_copies_are_compared(ran, plan_on):
    plan_on("emulator")
    norm, own, x = Norm(48), Norm(48), drawn(2, 3, 48)
    fuse(norm)
    strided = torch.linspace(0.5, 1.5, 96)[::2]
    with torch.no_grad():
        for weight in (*[strided] * 4, torch.ones(96).bfloat16()[::2], torch.ones(2)[::2], strided):
            norm.weight = own.weight = torch.nn.Parameter(weight, requires_grad=False)
            made, want = norm(x), own(x)
            assert made.dtype is want.dtype and made.stride() == want.stride()
            torch.testing.assert_close(made, want)


class OfType(Norm):
    def forward(self, x):
        eps = self.eps if x.dtype == torch.float32 else self.half_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def test_modules_that_read_other_attributes_share_no_check(ran):
    x = drawn(2, 3, 24)
    one, other, own = OfType(), OfType(), OfType()
    one.half_eps = 1e-3
    fuse(one)
    fuse(other)
    with torch.no_grad():
        one.bfloat16()
        for _ in range(3):
            one(x.bfloat16())
        torch.testing.assert_close(other(x), own(x))
        for wrong in (None, 1.0):
            errors = []
            for of in (own, other):
                with pytest.raises(AttributeError) as found:
                    of(wrong)
                errors.append(str(found.value))
            assert errors[0] == errors[1]
        torch.testing.assert_close(other(torch.tensor(2.0)), own(torch.tensor(2.0)))


def test_layouts_in_turn_are_made_once(ran):
    norm, own = Norm(), Norm()
    fuse(norm)
    last, spread = drawn(2, 3, 24), drawn(3, 2, 24).transpose(0, 1)
    with torch.no_grad():
        for _ in range(4):
            for x in (last, spread):
                torch.testing.assert_close(norm(x), own(x))
    (calls,) = fused_calls._kept
    assert len(calls.recent) == 3


def test_sums_before_norms(ran):
    layer, own = Layer(), Layer()
    own.load_state_dict(layer.state_dict())
    fuse(layer)
    with torch.no_grad():
        for seed in range(3):
            x, residual = drawn(2, 3, 24, seed=seed), drawn(2, 3, 24, seed=seed + 9)
            for made, want in zip(layer(x, residual), own(x, residual), strict=True):
                torch.testing.assert_close(made, want)
    assert ran
