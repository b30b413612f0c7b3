"""Norms with gates, along channels, and on both sides of a residual sum, fused in place."""

import copy

import pytest
import torch
from torch.nn import functional as F

from graphfuse import GraphNotSupportedError
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.torch import fuse, kernel_mapping, unfuse
from support.dispatched import operators, regions
from support.traces import BELOW

pytestmark = pytest.mark.torch

HIDDEN, EPS = 32, 1e-5
HALF = torch.bfloat16


class Norm(torch.nn.Module):
    def __init__(self, columns=HIDDEN, eps=EPS):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(columns) * 0.3), eps

    def normal(self, wide):
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self.normal(x.float()) * (1.0 + self.weight.float())).type_as(x)


class NormThenGate(Norm):
    """As Qwen3-Next's."""

    def forward(self, hidden_states, gate):
        y = self.weight * self.normal(hidden_states.float()).to(hidden_states.dtype)
        return (y * F.silu(gate.to(torch.float32))).to(hidden_states.dtype)


class SigmoidGate(Norm):
    """As Kimi-Linear's."""

    def forward(self, x, gate=None):
        y = self.weight.float() * self.normal(x.float()) * torch.sigmoid(gate.float())
        return y.to(x.dtype)


class GatedGroups(Norm):
    """As Mamba-2's."""

    def __init__(self, group_size=8):
        super().__init__()
        self.group_size = group_size

    def forward(self, hidden_states, gate=None):
        wide = hidden_states.float()
        if gate is not None:
            wide = wide * F.silu(gate.float())
        *leading, last = wide.shape
        y = self.normal(wide.view(*leading, last // self.group_size, self.group_size)).view(*leading, last)
        return self.weight * y.to(hidden_states.dtype)


class RoundedGateNorm(Norm):
    """Whose activated gate is rounded."""

    def forward(self, x, gate):
        return super().forward(x) * F.silu(gate)


class ChannelNorm(torch.nn.Module):
    """As the VAE of WAN has it."""

    def __init__(self, channels=16, first=True, images=False, bias=False):
        super().__init__()
        shape = (channels, *(1,) * (3 - images)) if first else (channels,)
        self.channel_first, self.scale = first, channels**0.5
        self.gamma = torch.nn.Parameter(torch.randn(shape))
        self.bias = torch.nn.Parameter(torch.randn(shape)) if bias else 0.0

    def forward(self, x):
        return F.normalize(x, dim=(1 if self.channel_first else -1)) * self.scale * self.gamma + self.bias


class PermutedNorm(torch.nn.LayerNorm):
    """As vision models have it: channels are moved to the last dimension and back."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class TransposedNorm(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class IndexedNorm(Norm):
    """Weights are vectors, and are given the dimensions of an image where they are read."""

    def forward(self, x):
        apart = x - x.mean(1, keepdim=True)
        normal = apart / torch.sqrt(apart.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * normal


class ChannelSoftmax(Norm):
    def forward(self, x):
        return F.softmax(x * self.weight[:, None, None], 1)


class ToChannelsLast(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1))


class RowsWithWeights(Norm):
    """A weight for each row: it gets a dimension, and the rows stay as they are."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight[:, None]


class OfImages(torch.nn.LayerNorm):
    """It has no meaning for fewer dimensions."""

    def forward(self, x):
        return super().forward(x.transpose(1, 3).transpose(1, 3))


class Sandwich(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.behind, self.between = Norm(), Norm(), Norm(eps=1e-3)
        self.mixer, self.mlp = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        residual = x
        x = self.behind(self.mixer(self.before(x)))
        x = residual + x
        return x + self.mlp(self.between(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = ChannelNorm(), ChannelNorm(bias=True)
        self.activation = torch.nn.SiLU()

    def forward(self, x):
        return x + self.activation(self.two(F.silu(self.one(x)).atan()))


def drawn(*shape, dtype=HALF, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(module, seed=3):
    torch.manual_seed(seed)
    return module().to(HALF)


ROWS, VIDEO = (2, 5, HIDDEN), (2, 16, 3, 4, 5)
GATED = [
    (NormThenGate, "rmsnorm, mul, swish"),
    (SigmoidGate, "rmsnorm, sigmoid, mul"),
    (GatedGroups, "swish, mul, rmsnorm"),
    (lambda: GatedGroups(HIDDEN), "swish, mul, rmsnorm"),
]


@pytest.mark.parametrize(("module", "operations"), GATED)
def test_gates(module, operations):
    norm, x, gate = made(module), drawn(*ROWS).requires_grad_(), drawn(*ROWS, seed=1)
    own = copy.deepcopy(norm)
    (entry,) = fuse(norm).entries
    assert (entry.became, entry.why) == ("region", operations)
    with torch.no_grad():
        assert regions(lambda: norm(x, gate)) == regions(lambda: norm(x, gate=gate)) == [operations]
        assert torch.equal(norm(x, gate), own(x, gate))
    grads = [torch.autograd.grad(m(x, gate).float().sum(), (x, m.weight)) for m in (norm, own)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    assert unfuse(norm) == ("",)


@pytest.mark.parametrize(
    "call",
    [
        lambda norm, x, gate: norm(x),
        lambda norm, x, gate: norm(x, None),
        lambda norm, x, gate: norm(x, gate[:, :1]),
        lambda norm, x, gate: norm(x, gate.double()),
        lambda norm, x, gate: norm.double()(x, gate),
    ],
)
def test_calls_that_an_operator_would_compute_otherwise_run_the_own_forward(call):
    norm, x, gate = made(GatedGroups), drawn(*ROWS), drawn(*ROWS, seed=1)
    fuse(norm)
    own = copy.deepcopy(norm)
    unfuse(own)
    with torch.no_grad():
        assert operators(lambda: call(norm, x, gate)) == []
        assert torch.equal(call(norm, x, gate), call(own, x, gate))


def test_attributes_that_forward_reads_are_compared_at_each_call():
    norm, x, gate = made(GatedGroups), drawn(*ROWS), drawn(*ROWS, seed=1)
    fuse(norm)
    norm.group_size = 16
    with torch.no_grad():
        assert operators(lambda: norm(x, gate)) == []
        norm.group_size = 8
        assert operators(lambda: norm(x, gate)) == ["region"]
        norm.eps = 1.0
        assert operators(lambda: norm(x, gate)) == []
        got = norm(x, gate)
        unfuse(norm)
        assert torch.equal(got, norm(x, gate))


def spread_rows() -> list[tuple[torch.Tensor, torch.Tensor, list[str]]]:
    """Activations and gates whose rows are not one block, and the operators that run."""
    batch, rows, columns = 2, 12, HIDDEN
    whole, gates = drawn(batch, rows + 4, columns), drawn(batch, rows, columns, seed=1)
    wide = drawn(batch, rows, 3 * columns, seed=2)
    columns_apart = drawn(batch, columns, rows).transpose(1, 2)
    return [
        (whole[:, :rows], gates, ["region"]),
        (gates, whole[:, 4:], ["region"]),
        (wide[..., columns : 2 * columns], wide[..., :columns], ["region"]),
        (drawn(rows, batch, columns).transpose(0, 1), gates, []),
        (gates, drawn(rows, batch, columns).transpose(0, 1), []),
        (drawn(batch, 1, columns).expand(batch, rows, columns), gates, ["region"]),
        (columns_apart, gates, []),
        (gates, columns_apart, []),
    ]


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_groups_of_rows_that_are_not_one_block(case, dtype):
    x, gate, ran = spread_rows()[case]
    norm, x, gate = made(GatedGroups).to(dtype), x.to(dtype), gate.to(dtype)
    with torch.no_grad():
        try:
            want = norm(x, gate)
        except RuntimeError as error:  # the view of it is not possible
            want = error
        fuse(norm)
        if isinstance(want, RuntimeError):
            with pytest.raises(RuntimeError, match="view"):
                norm(x, gate)
            return
        assert operators(lambda: norm(x, gate)) == ran
        got = norm(x, gate)
    torch.testing.assert_close(got, want, rtol=0.01 if dtype is HALF else 2e-6, atol=2e-6)
    assert got.shape == want.shape and got.stride() == want.stride()


@pytest.mark.parametrize("case", [0, 1, 2])
def test_groups_of_rows_that_are_not_one_block_by_kernels_alone(case, plan_on, monkeypatch):
    plan_on("emulator")
    monkeypatch.setattr(ReferenceEngine, "run", None)
    norm, (x, gate, _) = made(GatedGroups).float(), spread_rows()[case]
    with torch.no_grad():
        want = norm(x.float(), gate.float())
        fuse(norm)
        torch.testing.assert_close(norm(x.float(), gate.float()), want, rtol=1e-5, atol=1e-5)


def test_the_layer_for_kernels():
    layer = kernel_mapping("cpu")["RMSNormGated"]["cpu"].load()
    norm, x, gate = made(GatedGroups), drawn(*ROWS), drawn(*ROWS, seed=1)
    with torch.no_grad():
        want, without = norm(x, gate), norm(x)
        assert operators(lambda: layer.forward(norm, x, gate)) == ["region"]
        assert torch.equal(layer.forward(norm, x, gate=gate), want)
        assert torch.equal(layer.forward(norm, x), without)


def test_a_gate_that_is_rounded():
    norm, x, gate = made(RoundedGateNorm), drawn(*ROWS), drawn(*ROWS, seed=1)
    want = norm(x, gate)
    assert [e.became for e in fuse(norm).entries] == ["region"]
    assert torch.equal(norm(x, gate), want)


CHANNELS = [
    (lambda: ChannelNorm(), VIDEO),
    (lambda: ChannelNorm(bias=True), VIDEO),
    (lambda: ChannelNorm(images=True), VIDEO[:4]),
    (lambda: ChannelNorm(first=False, bias=True), (2, 3, 4, 16)),
    (lambda: PermutedNorm(16), VIDEO[:4]),
    (lambda: PermutedNorm(16, elementwise_affine=False), VIDEO[:4]),
    (lambda: TransposedNorm(16), (2, 16, 5)),
    (lambda: IndexedNorm(16), VIDEO[:4]),
    (lambda: ChannelSoftmax(16), VIDEO[:4]),
    (lambda: ToChannelsLast(16), VIDEO[:4]),
    (lambda: RowsWithWeights(16), (2, 16, 5)),
]


@pytest.mark.parametrize(("module", "shape"), CHANNELS)
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_channels(module, shape, dtype):
    norm, x = made(module).to(dtype), drawn(*shape, dtype=dtype)
    own, outer = copy.deepcopy(norm), torch.randn(norm(x).shape)
    for layout in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
        unfuse(norm)
        with torch.no_grad():
            want = norm(layout)
            fuse(norm)
            assert operators(lambda: norm(layout)) == ["region"]
            got = norm(layout)
        torch.testing.assert_close(got, want, rtol=0.01 if dtype is HALF else 2e-6, atol=2e-6)
        assert got.stride() == want.stride()
        grads = []
        for module in (norm, own):
            leaf = layout.detach().requires_grad_()
            grads.append(torch.autograd.grad((module(leaf) * outer).sum(), (leaf, *module.parameters())))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=(1e-2 if dtype is HALF else 1e-5) * b.abs().max().item())
    assert operators(lambda: norm(x)) == ["region_training" if [*norm.parameters()] else "region"]


@pytest.mark.parametrize(("module", "shape"), CHANNELS)
def test_channels_by_kernels_alone(module, shape, plan_on, monkeypatch):
    plan_on("emulator")
    monkeypatch.setattr(ReferenceEngine, "run", None)
    norm, x = made(module).float(), drawn(*shape, dtype=torch.float32)
    own = copy.deepcopy(norm)
    fuse(norm)
    for layout in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
        with torch.no_grad():
            torch.testing.assert_close(norm(layout), own(layout), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm(x.requires_grad_()), own(x), rtol=1e-5, atol=1e-5)


class OwnRMS(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize(
    "module",
    [
        lambda: torch.nn.LayerNorm(16),
        lambda: torch.nn.RMSNorm(16, eps=1e-6),
        lambda: torch.nn.Softmax(-1),
        lambda: OwnRMS(16),
    ],
)
def test_rows_that_are_not_contiguous_run_in_kernels_and_lie_as_in_eager_mode(module, plan_on, monkeypatch):
    plan_on("emulator")
    monkeypatch.setattr(ReferenceEngine, "run", None)
    norm, x = made(module).float(), drawn(2, 16, 5, dtype=torch.float32).transpose(1, 2)
    own = copy.deepcopy(norm)
    fuse(norm)
    with torch.no_grad():
        got, want = norm(x), own(x)
        assert operators(lambda: norm(x)) == ["region"]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert got.stride() == want.stride()
    torch.testing.assert_close(norm(x.detach().requires_grad_()), want, rtol=1e-5, atol=1e-6)


def test_a_norm_of_images_alone():
    norm, x = made(lambda: OfImages(16)), drawn(2, 3, 5, 16)
    own = copy.deepcopy(norm)
    assert [e.became for e in fuse(norm).replaced] == ["region"]
    with torch.no_grad():
        assert operators(lambda: norm(x)) == ["region"]
        torch.testing.assert_close(norm(x), own(x), rtol=0.01, atol=0.01)


def test_other_ways_of_differentiating_are_refused():
    norm, x = made(ChannelNorm).float(), drawn(*VIDEO, dtype=torch.float32)
    fuse(norm.requires_grad_(False))
    with pytest.raises(GraphNotSupportedError, match="region is differentiated by torch.func"):
        torch.func.grad(lambda x: norm(x).square().sum())(x)
    with pytest.raises(GraphNotSupportedError, match="region has no forward-mode derivative"):
        torch.func.jvp(norm, (x,), (torch.ones_like(x),))
    with torch.no_grad():
        assert operators(lambda: norm(x)) == ["region"]


def test_the_silu_of_a_norm_along_channels():
    block, x, unit = made(Block), drawn(*VIDEO), f"reduction, {BELOW}, binary_select, div, mul, add"
    with torch.no_grad():
        want = block(x)
        assert [(e.name, e.became, e.why) for e in fuse(block).replaced[2:]] == [
            ("", "region", f"{unit}, swish; with one"),
            ("", "region", f"{unit}, swish; with two and activation"),
        ]
        assert regions(lambda: block(x)) == [f"{unit}, swish"] * 2
        torch.testing.assert_close(block(x), want, rtol=0.01, atol=0.01)
        block.activation.register_forward_hook(lambda module, given, y: y * 2)
        assert regions(lambda: block(x)) == [f"{unit}, swish", unit]
        block.activation = torch.nn.GELU()
        got = block(x)
        unfuse(block)
        torch.testing.assert_close(got, block(x), rtol=0.01, atol=0.01)


def test_norms_on_both_sides_of_a_sum():
    layer, x = made(Sandwich), drawn(*ROWS)
    own = copy.deepcopy(layer)
    with torch.no_grad():
        want = layer(x)
        report = fuse(layer)
        assert [(e.became, e.why) for e in report.replaced[3:]] == [("region", "add, rmsnorm; with behind and between")]
        assert regions(lambda: layer(x)) == ["add, rmsnorm"] * 2
        assert torch.equal(layer(x), want)
    assert operators(lambda: layer(x)) == ["region_training"] * 2
    grads = [torch.autograd.grad(m(x).float().square().sum(), [*m.parameters()]) for m in (layer, own)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01 * b.abs().max().item())
    # Hooks of each norm are called.
    for norm in ("behind", "between"):
        seen = []
        handle = getattr(layer, norm).register_forward_hook(lambda module, given, y, seen=seen: seen.append(y.shape))
        with torch.no_grad():
            assert operators(lambda: layer(x)) == ["region"] * 3
            assert torch.equal(layer(x), want) and len(seen) == 2
        handle.remove()


def test_compiled():
    torch._dynamo.reset()
    images = drawn(*VIDEO[:4])
    spread = images.transpose(1, -1).contiguous().transpose(1, -1)
    for module, given in (
        (Sandwich, (drawn(*ROWS),)),
        (Block, (drawn(*VIDEO),)),
        (NormThenGate, (drawn(*ROWS),) * 2),
        (lambda: PermutedNorm(16), (images,)),
        (lambda: ChannelSoftmax(16), (spread,)),
        (lambda: torch.nn.Softmax(-1), (spread,)),
    ):
        layer = made(module)
        fuse(layer)
        with torch.no_grad():
            assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(*given), layer(*given))
