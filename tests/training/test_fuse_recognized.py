"""Which modules are norms that an operator computes, by their forward, and which calls of them it computes."""

import copy
from types import FunctionType

import pytest
import torch
from torch.nn import functional as F

import graphfuse
from graphfuse.torch import fuse
from graphfuse.torch.regions.composites import _clamp_has_gradients_at_limits
from graphfuse.torch.whole_models.forward import recognized
from support.dispatched import operators, regions
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


class OfAllNorm(LlamaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean() + self.variance_epsilon) * self.weight


class ShiftedNorm(LlamaNorm):
    def forward(self, x):
        y = super().forward(x)
        return y * torch.cos(y.cumsum(-1))


class LogSumExp(torch.nn.Module):
    """Nothing is reduced for its gradients."""

    def forward(self, x):
        return torch.logsumexp(x, -1)


REFUSED = [
    (lambda: Counting(), None),
    (lambda: OfAllNorm(), "no one kernel computes rmsnorm and mul"),
    (lambda: ShiftedNorm(), "its forward is not straight: line 3 reads what a norm does not need: y.cumsum"),
    (lambda: torch.nn.LayerNorm((4, 16)), "its parameters are not vectors of one length"),
    (lambda: graphfuse.torch.RMSNorm(HIDDEN), "it is graphfuse's"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_refused(make, why):
    found = recognized(make())
    if why is None:  # not called a norm
        assert found is None
    else:
        assert isinstance(found, str) and found.startswith(why)


TAKEN = [
    (lambda: Unnamed(), "rmsnorm, mul"),
    (lambda: GatedNorm(), "rmsnorm, mul, swish"),
    (lambda: RootNorm(), "mul, reduction, add, rsqrt, cast to BFLOAT16"),
    (lambda: TwiceNorm(), "mul, rmsnorm"),
]


@pytest.mark.parametrize(("make", "operations"), TAKEN)
def test_found_by_what_it_computes(make, operations):
    norm = make().to(HALF)
    assert recognized(norm).first.program.operations == operations
    given = [torch.randn(2, 5, HIDDEN).to(HALF) for _ in recognized(norm).calls.calls[0].named]
    want = norm(*given)
    fuse(norm)
    with torch.no_grad():
        assert regions(lambda: norm(*given)) == [operations]
    torch.testing.assert_close(norm(*given), want, rtol=0.01, atol=0.01)


def test_a_forward_of_no_module():
    forward = FunctionType(LlamaNorm.forward.__code__, {"torch": torch})
    assert forward.__module__ is None
    assert len(fuse(type("Norm", (LlamaNorm,), {"forward": forward})()).entries) == 1


class ClampedNorm(LlamaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True).clamp(min=1e-6)).to(x.dtype)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(HIDDEN), ClampedNorm()])
def test_fused_in_inference_mode(norm):
    """There composite operators are not taken apart before modes see them."""
    kind = type(f"Own{type(norm).__name__}", (type(norm),), {"forward": type(norm).forward})
    norm.__class__ = kind  # of which nothing is known yet
    _clamp_has_gradients_at_limits.cache_clear()
    with torch.inference_mode():
        assert len(fuse(norm).replaced) == 1
        x = torch.randn(2, 5, HIDDEN)
        torch.testing.assert_close(norm(x), kind.forward(norm, x))
        assert len(regions(lambda: norm(x))) == 1


@pytest.mark.parametrize(
    ("make", "operations"),
    [
        (LogSumExp, "logsumexp"),
        (lambda: torch.nn.Softmax(1), "softmax"),
        (lambda: torch.nn.LogSoftmax(-1), "log_softmax"),
        (lambda: torch.nn.Softmin(-1), "neg, softmax"),
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_modules_of_one_reduction(make, operations, gradients):
    """Without gradients, and with them where kernels make them."""
    module, x = make(), torch.randn(4, 6, 64, requires_grad=gradients)
    want = module(x)
    fuse(module)
    assert regions(lambda: module(x)) == [operations] * (not gradients or operations != "logsumexp")
    made = module(x)
    torch.testing.assert_close(made, want)
    if gradients:
        outer = torch.linspace(-1, 1, made.numel()).view(made.shape)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, outer) for y in (made, want)))


def test_no_norms():
    for module in (Activation(), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 4)):
        assert recognized(module) is None


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


class ByNames(LlamaNorm):
    """Says which types it normalizes in float32, as the norms of diffusers' video autoencoders do."""

    def __init__(self):
        super().__init__()
        self.names = ["float8_", "float4_"]

    def forward(self, x):
        is_narrow = x.dtype in (torch.float16, torch.bfloat16) or any(n in str(x.dtype) for n in self.names if n)
        wide = x.float() if is_narrow else x
        first, second = [y * 1.0 for y in (wide, wide)]
        return self.weight * (first * torch.rsqrt(second.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("norm", [Groups, Switched, ByNumber, ByNames])
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
    """What a class computes is read from its forward, whatever its name."""
    cls = type("LlamaRMSNorm", (LlamaNorm,), {"__module__": "transformers.models.llama.modeling_llama"})

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).to(hidden_states.dtype)

    cls.forward = forward
    norm, x = cls().to(HALF), torch.randn(3, HIDDEN).to(HALF)
    want = norm(x)
    assert [e.why for e in fuse(norm).replaced] == ["add, rmsnorm"]
    torch.testing.assert_close(norm(x), want, rtol=0.01, atol=0.01)


class NormThenGelu(LlamaNorm):
    def forward(self, x):
        return F.gelu(super().forward(x))


class Softmax(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x.float() * 0.5, dim=-1).to(x.dtype)


@pytest.mark.parametrize("module", [NormThenGelu, Softmax])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_other_modules_that_one_kernel_computes(module, dtype):
    made = module().to(dtype)
    own = copy.deepcopy(made)
    assert len(fuse(made).replaced) == 1
    for shape in ((2, 5, HIDDEN), (3, HIDDEN), (2, 1, 5, HIDDEN)):
        x, given = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(2))
        want, got = own(x.requires_grad_()), made(given.requires_grad_())
        assert len(operators(lambda given=given: made(given))) == 1
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)
        got.float().square().sum().backward(), want.float().square().sum().backward()
        torch.testing.assert_close(given.grad, x.grad, rtol=0.03, atol=0.03)


@torch.no_grad()
@pytest.mark.parametrize("module", [NormThenGelu, Softmax])
def test_results_lie_as_torch_lays_them_out(module):
    made, x = module(), torch.randn(3, HIDDEN, 5).transpose(1, 2)
    want = made(x)
    fuse(made)
    got = made(x)
    assert operators(lambda: made(x)) == ["region"] and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


def test_rows_of_another_extent_than_a_trace_had():
    made, x = Softmax(), torch.randn(4, 100)
    want = made(x)
    fuse(made)
    with torch.no_grad():
        assert operators(lambda: made(x)) == ["region"]
    torch.testing.assert_close(made(x), want)


@torch.no_grad()
def test_a_changed_epsilon():
    """A program has the epsilon that the module had. With another the module's own forward runs."""
    norm, x = LlamaNorm().to(HALF), torch.randn(3, HIDDEN).to(HALF) * 1e-3
    fuse(norm)
    norm.variance_epsilon = 1.0
    want = norm(x)
    assert operators(lambda: norm(x)) == []
    fuse(norm)
    assert operators(lambda: norm(x)) == ["region"]
    torch.testing.assert_close(norm(x), want, rtol=0.01, atol=0.01)


@torch.no_grad()
def test_modules_of_one_class_with_other_epsilons():
    model = torch.nn.Sequential(*(LlamaNorm(eps=eps) for eps in (1e-6, 1.0, 1e-6))).to(HALF)
    x = torch.randn(3, HIDDEN).to(HALF) * 0.1
    want = model(x)
    assert len(fuse(model).replaced) == 3
    assert operators(lambda: model(x)) == ["region"] * 3
    torch.testing.assert_close(model(x), want, rtol=0.01, atol=0.01)


@torch.no_grad()
@pytest.mark.parametrize("types", [(HALF, torch.float32), (torch.float32, HALF), (torch.float16, HALF)], ids=str)
def test_types_that_fuse_has_not_seen(types):
    """Their program is made at the first call, also under somebody's mode."""
    x, norm = torch.randn(2, 3, 2, 1, HIDDEN).to(types[0]), LlamaNorm().to(types[1])
    want = norm(x)
    fuse(norm)
    assert operators(lambda: norm(x)) == ["region"]
    got = norm(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)
    other = LlamaNorm().double()
    fuse(other)
    assert operators(lambda: other(x.double())) == []


def test_types_that_compiled_calls_have_not_seen():
    """Their program is not made while somebody compiles: the module's own forward is."""
    norm, x = LlamaNorm(eps=0.125), torch.randn(2, 3, HIDDEN).to(HALF)
    want = norm(x)
    fuse(norm)
    torch._dynamo.reset()
    fast = torch.compile(norm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x), want, rtol=0.01, atol=0.01)
    with torch.no_grad():
        assert operators(lambda: norm(x)) == ["region"]
    torch.testing.assert_close(fast(x), want, rtol=0.01, atol=0.01)


class Constant(LlamaNorm):
    def forward(self, x):
        return super().forward(x.view(7, -1, HIDDEN).view(x.shape))


class Squeezing(LlamaNorm):
    def forward(self, x):
        return super().forward(x.squeeze(0))


@pytest.mark.parametrize("norm", [Constant, Squeezing])
def test_what_depends_on_numbers_of_rows(norm):
    made = norm()
    own = copy.deepcopy(made)
    fuse(made)
    for x in (torch.randn(7, 5, HIDDEN), torch.randn(1, 7, HIDDEN)):
        torch.testing.assert_close(made(x), own(x))


class FlatNorm(LlamaNorm):
    """Rows that are viewed as parts, one below the other: what the module returns, or what it normalizes."""

    def __init__(self, is_behind: bool):
        super().__init__(HIDDEN)
        self.is_behind = is_behind

    def forward(self, hidden_states):
        if self.is_behind:
            return torch.softmax(super().forward(hidden_states).reshape(-1, 16), -1)
        return super().forward(torch.softmax(hidden_states.reshape(-1, 16), -1).view(hidden_states.shape))


@pytest.mark.parametrize("shape", [(3, HIDDEN), (2, 3, HIDDEN), (1, HIDDEN)], ids=str)
@pytest.mark.parametrize("is_behind", [True, False])
def test_parts_of_rows_that_are_viewed_as_rows(is_behind, shape):
    norm = FlatNorm(is_behind).to(HALF)
    x = torch.randn(shape).to(HALF)
    want = norm(x)
    report = fuse(norm)
    assert (len(report.replaced) == 0) == is_behind
    torch.testing.assert_close(norm(x), want, rtol=2e-2, atol=2e-2)
