"""Group norm in three kernels, against float64: in any layout, what is launched, what other sizes compile."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.emulator.kernel import EmulatedLauncher
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.planning import kernels
from graphfuse.torch import fuse
from graphfuse.torch.convolutional import group_norm
from graphfuse.torch.operators.channel_kernels import channel_factors, joined_moments
from support.group_norms import CLOSE, drawn, exact, norm, run_from

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("error::graphfuse.ReferenceEngineWarning")]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    run_from(0, monkeypatch)


def check(of, x):
    """Three times each: in full, by the fast paths of functions, and prepared, in memory that has other numbers behind
    the moments."""
    wanted = exact(of, x)
    for silu in (False, True) * 3:
        made = group_norm.group_norm(x, of, silu)
        full = F.silu(wanted.to(x.dtype).double()) if silu else wanted
        assert made.dtype is x.dtype and made.stride() == x.stride()
        assert (made - full).abs().max() <= CLOSE[x.dtype] * full.abs().max()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
@pytest.mark.parametrize(
    "shape", [(2, 16, 8, 12), (1, 16, 3, 4, 12), (3, 16, 96), (1, 12, 4, 4), (2, 16, 32, 56)], ids=str
)
def test_exact_in_any_shape_and_layout(shape, last, dtype):
    check(norm(4, shape[1], dtype), drawn(*shape, dtype=dtype, last=last))


@pytest.fixture(params=["of pieces", "of channels"])
def moments_read(request, monkeypatch):
    """What the rows of a group are: the moments of all pieces, or of whole channels, which are combined first."""
    if request.param == "of channels":
        monkeypatch.setattr(group_norm, "_MOST_READ", 0)
        monkeypatch.setattr(group_norm, "_prepared", {})
    group_norm._views.cache_clear()
    yield request.param
    group_norm._views.cache_clear()


@pytest.fixture
def launched(monkeypatch, plan_on):
    """Launches on the emulator since. None is the reference engine's."""
    plan_on("emulator")
    calls, own = [], EmulatedLauncher.launch
    monkeypatch.setattr(EmulatedLauncher, "launch", lambda *given: calls.append(given) or own(*given))
    monkeypatch.setattr(ReferenceEngine, "run", None)
    return calls


@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 16, 8, 12), 1),
        ((2, 16, 8, 12), 4),
        ((2, 16, 8, 12), 16),
        ((3, 15, 16), 5),
        ((1, 15, 7, 16), 3),
        ((1, 14, 3, 16, 16), 2),
        ((2, 24, 32, 32), 3),
    ],
    ids=str,
)
def test_on_kernels(shape, groups, last, launched, moments_read):
    of, x = norm(groups, shape[1], torch.bfloat16), drawn(*shape, dtype=torch.bfloat16, last=last)
    check(of, x)
    launched.clear()
    group_norm.group_norm(x, of)
    assert len(launched) == (3 if moments_read == "of pieces" else 4)


@pytest.mark.parametrize("shape", [(2, 16, 3, 15), (1, 24, 3, 9, 25), (1, 16, 2, 17)], ids=str)
def test_places_without_a_power_of_two(shape, launched):
    of = norm(4, shape[1], torch.bfloat16)
    check(of, drawn(*shape, dtype=torch.bfloat16, last=True))
    assert launched and group_norm.group_norm(drawn(*shape, dtype=torch.bfloat16), of) is None
    prime = drawn(1, 16, 1, 257, dtype=torch.bfloat16, last=True)
    assert group_norm.group_norm(prime, of) is None


@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
def test_torch_allocates_and_does_nothing_else(last, launched):
    of, act, x = norm(), torch.nn.SiLU(), drawn(1, 16, 8, 16, last=last)
    for _ in range(2):
        group_norm.followed(of, act, x)
    with torch.profiler.profile() as profiled:
        group_norm.followed(of, act, x)
    names = [e.name for e in profiled.events() if e.name.startswith("aten::")]
    assert names == ["aten::empty_strided"] * 2


@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
def test_no_kernel_is_made_for_another_resolution(last, plan_on, monkeypatch, moments_read):
    sources, own = set(), kernels.compiled

    def compiled(source, *more):
        sources.add(source)
        return own(source, *more)

    plan_on("emulator")
    monkeypatch.setattr(kernels, "compiled", compiled)
    counts = []
    for width in (24, 40, 56):
        group_norm.group_norm(drawn(2, 16, 8, width, last=last), norm(), silu=True)
        counts.append(len(sources))
    if moments_read == "of pieces":
        assert counts == [3, 3, 3]
    else:
        assert counts == [4, 4, 4]


@pytest.mark.parametrize(
    ("places", "channels", "first", "then"),
    [(1 << 18, 128, 4096, None), (1 << 14, 512, 1024, None), (1 << 18, 4096, 1024, 128), (1 << 8, 64, 1024, None)],
)
def test_rows_of_moments_are_short(places, channels, first, then):
    """Of 32 groups. Where a group has many, they are those of a channel, and then of the group's channels."""
    views = group_norm._views((1, channels, places), (channels * places, places, 1), 32)
    assert views.rows[0][-1] == first and (views.channels and views.channels[0][-1]) == then


def test_moments_that_kernels_cannot_number_are_torchs(monkeypatch):
    monkeypatch.setattr(group_norm, "LONGEST", 8)
    group_norm._views.cache_clear()
    assert group_norm.group_norm(drawn(1, 16, 8, 16), norm(groups=2)) is not None
    assert group_norm.group_norm(drawn(1, 16, 8, 80), norm(groups=2)) is None
    group_norm._views.cache_clear()


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_what_is_behind_the_moments_does_not_count(length, device, plan_on):
    plan_on(device)
    means, variances = drawn(2, 3, 64), drawn(2, 3, 64, seed=2).abs()
    mean, variance = means[..., :length].double(), variances[..., :length].double()
    mean, variance = mean.mean(-1, True), (mean.var(-1, correction=0, keepdim=True) + variance.mean(-1, True))
    for t in (means, variances):
        t[..., length:] = float("nan")
    for made, wanted in zip(joined_moments(means, variances, float(length)), (mean, variance), strict=True):
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)
    weight, bias = torch.randn(2, 24).unbind() if device == "cpu" else torch.randn(24, 2).unbind(1)
    rows = [t[:, :, None].expand(2, 3, 8, 64) for t in (means, variances)]
    for _ in range(2):  # in full, and by its fast path
        scale, shift = channel_factors(*rows, weight, bias, float(length))
        wanted = variance.rsqrt() * weight.double().view(3, 8)
        torch.testing.assert_close(scale.double(), wanted.flatten(1), rtol=1e-5, atol=1e-5)
        wanted = bias.double().view(3, 8) - mean * wanted
        torch.testing.assert_close(shift.double(), wanted.flatten(1), rtol=1e-5, atol=1e-4)


def test_a_module_that_norms_each_frame(launched):
    mochi = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_mochi")
    of = mochi.MochiChunkedGroupNorm3D(16, num_groups=4, chunk_size=2).bfloat16().requires_grad_(False)
    of.norm_layer = norm(dtype=torch.bfloat16)
    x = drawn(2, 16, 3, 4, 8, dtype=torch.bfloat16, last=True)
    wanted = exact(of.norm_layer, x.transpose(1, 2).flatten(0, 1)).unflatten(0, (2, 3)).transpose(1, 2)
    model = torch.nn.Sequential(of)
    assert [e.became for e in fuse(model).replaced if e.name == "0"] == [group_norm.BECAME]
    with_silu = F.silu(wanted.bfloat16().double())
    for call, full in ((model, wanted), (lambda x: group_norm.followed(of, torch.nn.SiLU(), x), with_silu)):
        made = call(x)
        assert len(launched) == 3 and made.movedim(1, -1).is_contiguous()
        assert (made - full).abs().max() <= 2**-7 * full.abs().max()
        launched.clear()
    parts = []
    of.norm_layer.register_forward_hook(lambda *given: parts.append(given))
    assert (model(x) - wanted).abs().max() <= 2**-7 * wanted.abs().max() and len(parts) == 3


def test_far_from_zero_it_is_as_exact_as_torch():
    of, x = norm(), drawn(1, 16, 32, 32) + 500
    wanted = exact(of, x)
    theirs = (of(x) - wanted).abs().max()
    assert (group_norm.group_norm(x, of) - wanted).abs().max() <= 4 * theirs
