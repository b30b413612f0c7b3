"""The spatial norm of CogVideoX: what its class computes, with convolutions of latents that are not upsampled."""

import functools

import pytest
import torch

from graphfuse.emulator.kernel import EmulatedLauncher
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.convolutional import spatial_norm
from graphfuse.torch.operators.channel_kernels import modulated_channels, modulated_channels_silu
from support.group_norms import run_from

cogvideox = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cogvideox")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("error::graphfuse.ReferenceEngineWarning")]

LATENTS, CHANNELS = 4, 16


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    run_from(0, monkeypatch)


@pytest.fixture
def ran(monkeypatch):
    """Names of the kernels that have run since, but for prepared calls."""
    names = []
    for kernel in (modulated_channels, modulated_channels_silu):

        def call(*given, kernel=kernel):
            names.append(kernel.__name__)
            return kernel(*given)

        monkeypatch.setattr(spatial_norm, kernel.__name__, functools.wraps(kernel)(call))
    return names


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
    for _ in range(3):  # the third call is prepared
        with torch.no_grad():
            made, cache = own(f, zq)
        assert made.movedim(1, -1).is_contiguous() and made.dtype is want.dtype
        assert (made - exact).norm() <= 1.1 * (want - exact).norm()
        assert cache["conv_y"].data_ptr() != cache["conv_b"].data_ptr()
        assert cache.keys() == kept.keys() and all(torch.equal(cache[name], t) for name, t in kept.items())
    assert ran == ["modulated_channels"] * 2 * of_input[0]
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
    made, activated = (kernel(x, scale, shift, y, b) for kernel in (modulated_channels, modulated_channels_silu))
    normal = torch.addcmul(shift.double(), x.double(), scale.double()).to(dtype)
    assert launches and made.dtype is dtype
    want = (normal * y + b).double()
    tight = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(made.double(), want, rtol=tight, atol=tight)
    torch.testing.assert_close(activated.double(), torch.nn.functional.silu(made.double()), rtol=tight, atol=tight)
    assert dtype is torch.float32 or (made.double() == want).double().mean() > 0.98


def block(dtype=torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    made = cogvideox.CogVideoXResnetBlock3D(CHANNELS, CHANNELS, temb_channels=0, groups=4, spatial_norm_dim=LATENTS)
    return made.to(dtype).requires_grad_(False).eval()


@torch.no_grad()
def test_silu_behind_it_is_in_its_kernel(ran):
    f, zq = drawn(1, CHANNELS, 3, 8, 8), drawn(1, LATENTS, 3, 4, 4, seed=2)
    apart = block()
    for module in (apart.norm1, apart.norm2):
        fuse(module)
    report = fuse(own := block())
    said = [e.why for e in report.replaced if e.name == "" and e.became == spatial_norm.BECAME]
    assert said == ["norm1 and nonlinearity; norm2 and nonlinearity"]
    made, cache = own(f, None, zq)
    assert ran == ["modulated_channels_silu"] * 2
    want, kept = apart(f, None, zq)
    assert ran[2:] == ["modulated_channels"] * 2
    torch.testing.assert_close(made, want, rtol=2**-6, atol=2**-6)
    assert {name: of.keys() if isinstance(of, dict) else type(of) for name, of in cache.items()} == {
        name: of.keys() if isinstance(of, dict) else type(of) for name, of in kept.items()
    }


def _relu(own):
    own.nonlinearity = torch.nn.ReLU()


def _hook_on_activation(own):
    own.nonlinearity.register_forward_hook(lambda module, given, made: made * 0)


def _gradients(own):
    own.requires_grad_(True)


@pytest.mark.parametrize("change", [_relu, _hook_on_activation, _gradients])
def test_what_is_changed_later_is_called(change, ran):
    f, zq, own = drawn(1, CHANNELS, 3, 8, 8), drawn(1, LATENTS, 3, 4, 4, seed=2), block()
    fuse(own)
    change(own)
    with torch.set_grad_enabled(change is _gradients):
        made, _ = own(f, None, zq)
        unfuse(own)
        want, _ = own(f, None, zq)
    assert "modulated_channels_silu" not in ran and made.requires_grad == want.requires_grad
    torch.testing.assert_close(made, want, rtol=2e-2, atol=2e-2)


class TakesFirst(torch.nn.Module):
    """Takes the first of a norm's results in several ways; only `usual` is one call."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = norm(), torch.nn.SiLU()

    def usual(self, f, zq):
        f, kept = self.norm(f, zq, conv_cache=None)
        f = self.act(f)
        return f, kept

    def in_list(self, f, zq):
        [f, kept] = self.norm(f, zq)
        f = self.act(f)
        return f, kept

    def second(self, f, zq):
        kept, f = self.norm(f, zq)
        f = self.act(kept)
        return f, kept

    def read_by_target(self, f, zq):
        kept = {}
        f, kept[f.dtype] = self.norm(f, zq)
        f = self.act(f)
        return f, kept

    def unpacked(self, f, zq):
        f, kept = self.norm(*(f, zq))
        f = self.act(f)
        return f, kept

    def nested(self, f, zq):
        f = self.act(self.norm(f, zq)[0])
        return f, None


@pytest.mark.parametrize("way", ["usual", "in_list", "second", "read_by_target", "unpacked", "nested"])
@torch.no_grad()
def test_ways_to_take_the_first_result(way, ran):
    class Way(TakesFirst):
        forward = vars(TakesFirst)[way]

    model, f, zq = Way(), drawn(1, CHANNELS, 3, 8, 8), drawn(1, LATENTS, 3, 4, 4, seed=2)
    want, _ = model(f, zq)
    fuse(model)
    made, _ = model(f, zq)
    assert ran == ["modulated_channels" + "_silu" * (way == "usual")]
    torch.testing.assert_close(made, want, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("given", [(), (None,), (None, None, None, None)], ids=len)
@torch.no_grad()
def test_errors_of_a_pair_are_the_norm_s(given):
    own = norm()
    with pytest.raises(Exception, match=".") as found:
        own(*given)
    with pytest.raises(found.type) as made:
        spatial_norm.followed(own, torch.nn.SiLU(), *given)
    assert str(made.value) == str(found.value)
