"""The spatial norm of CogVideoX: what its class computes, with convolutions of latents that are not upsampled."""

import pytest
import torch

from graphfuse.emulator.kernel import EmulatedLauncher
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.operators.channel_kernels import modulated_channels
from graphfuse.torch.whole_models import group_norm, spatial_norm

cogvideox = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cogvideox")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("error::graphfuse.ReferenceEngineWarning")]

LATENTS, CHANNELS = 4, 16


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(group_norm, "LEAST_CHANNELS_LAST", 0)


@pytest.fixture
def ran(monkeypatch):
    """Shapes that the kernel has computed since."""
    shapes, own = [], spatial_norm.modulated_channels

    def call(x, *given, **named):
        shapes.append(tuple(x.shape))
        return own(x, *given, **named)

    monkeypatch.setattr(spatial_norm, "modulated_channels", call)
    return shapes


def norm(dtype=torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    made = cogvideox.CogVideoXSpatialNorm3D(CHANNELS, LATENTS, groups=4)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_()
    return made.to(dtype).requires_grad_(False)


def drawn(*shape, dtype=torch.bfloat16, last=True, seed=1) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.contiguous(memory_format=torch.channels_last_3d) if last else x


FRAMES = [((1, 3, 4, 4), (1, 3, 8, 8)), ((2, 3, 2, 4), (2, 5, 8, 16)), ((1, 2, 4, 4), (1, 4, 4, 4))]
"""Samples, frames, height and width of latents, and of what is normalized."""
FRAMES += [((1, 1, 2, 3), (1, 1, 16, 24)), ((1, 3, 4, 4), (1, 9, 8, 4))]


@pytest.mark.parametrize(("of_latents", "of_input"), FRAMES, ids=str)
def test_as_the_class_computes_it(of_latents, of_input, ran):
    own = norm()
    zq, f = drawn(of_latents[0], LATENTS, *of_latents[1:]), drawn(of_input[0], CHANNELS, *of_input[1:], seed=2)
    exact, _ = norm(torch.float32)(f.float(), zq.float())
    want, kept = own(f, zq)
    report = fuse(own)
    assert [e.name for e in report.replaced if e.became == spatial_norm.BECAME] == [""]
    for _ in range(2):
        with torch.no_grad():
            made, cache = own(f, zq)
        assert made.movedim(1, -1).is_contiguous() and made.dtype is want.dtype
        assert (made - exact).norm() <= 1.1 * (want - exact).norm()
        assert cache["conv_y"].data_ptr() != cache["conv_b"].data_ptr()
        assert cache.keys() == kept.keys() and all(torch.equal(cache[name], t) for name, t in kept.items())
    assert len(ran) == 2 * of_input[0]
    unfuse(own)
    assert torch.equal(own(f, zq)[0], want)


def _hooked(own):
    own.conv_y.register_forward_hook(lambda *given: None)


def _another_norm(own):
    own.norm_layer = torch.nn.InstanceNorm3d(CHANNELS)


def _in_a_sequence(own):
    own.conv_y.conv = torch.nn.Sequential(own.conv_y.conv)


def _hooked_within(own):
    own.conv_b.conv.register_forward_hook(lambda *given: None)


def _training(own):
    own.conv_y.requires_grad_(True)


def _wide(own):
    own.conv_b = cogvideox.CogVideoXCausalConv3d(LATENTS, CHANNELS, 3).bfloat16()


@pytest.mark.parametrize(
    ("change", "f"),
    [
        (None, drawn(1, CHANNELS, 3, 8, 8, last=False)),
        (None, drawn(1, CHANNELS, 3, 12, 12)),  # three places of a place of latents
        (_hooked, drawn(1, CHANNELS, 3, 8, 8)),
        (_wide, drawn(1, CHANNELS, 3, 8, 8)),
        (_another_norm, drawn(1, CHANNELS, 3, 8, 8)),
        (_in_a_sequence, drawn(1, CHANNELS, 3, 8, 8)),
        (_hooked_within, drawn(1, CHANNELS, 3, 8, 8)),
        (_training, drawn(1, CHANNELS, 3, 8, 8)),
    ],
    ids=["layout", "scale", "hook", "convolution of places", "another norm", "sequence", "hook within", "gradients"],
)
def test_other_calls_run_the_class(change, f, ran):
    own, zq = norm(), drawn(1, LATENTS, 3, 4, 4)
    if change is not None:
        change(own)
    with torch.set_grad_enabled(change is _training):
        want, _ = own(f, zq)
        fuse(own)
        made, _ = own(f, zq)
    assert not ran and made.requires_grad == want.requires_grad
    torch.testing.assert_close(made, want, rtol=2e-2, atol=2e-2)  # the group norm may be kernels


def test_errors_are_the_class_s():
    own, f = norm(), drawn(1, CHANNELS, 3, 8, 8)
    errors = []
    for change in (lambda: None, lambda: fuse(own)):
        change()
        given = [(drawn(1, LATENTS + 1, 3, 4, 4),), (drawn(2, LATENTS, 3, 4, 4)[0],), (None,)]
        for more in (*given, (drawn(1, LATENTS, 3, 4, 4), [1])):
            with torch.no_grad(), pytest.raises(Exception, match=".") as found:
                own(f, *more)
            errors.append((found.type, str(found.value)))
    assert errors[:4] == errors[4:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 2, 5, 4, 16), (1, 4, 8, 5, 8, 32), (2, 3, 1, 5, 1, 24)], ids=str)
def test_on_kernels(shape, dtype, plan_on, monkeypatch):
    plan_on("emulator")
    launches, launch = [], EmulatedLauncher.launch
    monkeypatch.setattr(EmulatedLauncher, "launch", lambda *given: launches.append(given) or launch(*given))
    monkeypatch.setattr(ReferenceEngine, "run", None)
    frames, height, rows, width, columns, channels = shape
    x = torch.randn(1, *shape).to(dtype)
    y, b = (torch.randn(1, frames, height, 1, width, 1, channels).to(dtype) for _ in range(2))
    scale, shift = torch.randn(2, 1, channels)
    made = modulated_channels(x, scale, shift, y, b)
    normal = torch.addcmul(shift.double(), x.double(), scale.double()).to(dtype)
    assert launches and made.dtype is dtype
    want = (normal * y + b).double()
    tight = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(made.double(), want, rtol=tight, atol=tight)
    assert dtype is torch.float32 or (made.double() == want).double().mean() > 0.98
