"""Autoencoders of diffusers in 16 bits: weights channels-last, results where they were."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from graphfuse.torch import fuse, unfuse
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.convolutional import channels_last, group_norm, masked_attention
from graphfuse.torch.operators.convolution import FORMATS
from support import autoencoders
from support.group_norms import run_from
from support.video_autoencoders import distance, drawn

diffusers = pytest.importorskip("diffusers", minversion="0.35")
pytestmark = pytest.mark.torch

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def pools_of_16_bits(monkeypatch):
    """Torch has none of frames on CPUs, and Cosmos's encoder pools."""
    own = torch.nn.functional.avg_pool3d
    monkeypatch.setattr(torch.nn.functional, "avg_pool3d", lambda x, **more: own(x.float(), **more).to(x.dtype))


def small(dtype=torch.bfloat16, **more) -> torch.nn.Module:
    torch.manual_seed(3)
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 2}
    made = diffusers.AutoencoderKL(up_block_types=("UpDecoderBlock2D",) * 2, **sizes, **more)
    return made.eval().to(dtype)


def results(vae: torch.nn.Module) -> list[torch.Tensor]:
    dtype = vae.dtype
    with torch.no_grad():
        return [vae.decode(drawn(2, 4, 8, 12).to(dtype)).sample, vae.encoder(drawn(2, 3, 16, 24, seed=2).to(dtype))]


def weights(vae: torch.nn.Module) -> list[torch.Tensor]:
    found = (m.weight for end in (vae.encoder, vae.decoder) for m in end.modules() if isinstance(m, torch.nn.Conv2d))
    return [w for w in found if w[0, 0].numel() > 1]


@pytest.mark.parametrize("least", [0, group_norm.LEAST])
def test_results_are_where_they_were(least, monkeypatch):
    run_from(least, monkeypatch)
    exact, vae = results(small(torch.float32)), small()
    before, state = results(vae), {k: v.clone() for k, v in vae.state_dict().items()}
    report = fuse(vae)
    assert [e.name for e in report.replaced if e.became == "channels-last"] == ["encoder", "decoder"]
    assert all(w.is_contiguous(memory_format=LAST) and not w.is_contiguous() for w in weights(vae))
    for got, own, want in zip(results(vae), before, exact, strict=True):
        assert got.is_contiguous() and got.dtype is own.dtype
        assert distance(got.float(), want) <= 1.3 * distance(own.float(), want)
    for name, value in vae.state_dict().items():
        assert torch.equal(value, state[name]), name
    unfuse(vae)
    assert all(w.is_contiguous() for w in weights(vae))
    assert all(map(torch.equal, results(vae), before))


def test_images_are_channels_last_between_convolutions():
    vae, seen = small(), {}
    fuse(vae)
    for name, module in vae.decoder.named_modules():
        if type(module) is torch.nn.Conv2d:
            module.register_forward_hook(lambda m, x, y, name=name: seen.__setitem__(name, (m, x[0], y)))
    results(vae)
    assert len(seen) > 10
    for name, (_, x, y) in seen.items():
        assert y.is_contiguous(memory_format=LAST), name
        assert x.is_contiguous(memory_format=LAST) or name in ("conv_in", "mid_block.resnets.1.conv1"), name


def test_float32_keeps_its_layout():
    vae = small(torch.float32)
    before = results(vae)
    report = fuse(vae)
    assert [(e.name, e.why) for e in report.left] == [
        (name, "its layout: weights are not of 16 bits") for name in ("encoder", "decoder")
    ]
    assert all(w.is_contiguous() for w in weights(vae))
    for got, want in zip(results(vae), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_copies_training_and_fusing_again():
    vae = small()
    fuse(vae)
    twin = copy.deepcopy(vae)
    assert all(map(torch.equal, results(twin), results(vae)))
    unfuse(twin)
    assert all(w.is_contiguous() for w in weights(twin)) and not any(w.is_contiguous() for w in weights(vae))
    assert str(fuse(vae)) == str(fuse(vae))
    vae.decoder(drawn(1, 4, 8, 8).bfloat16()).float().sum().backward()
    assert all(m.weight.grad is not None for m in vae.decoder.modules() if isinstance(m, torch.nn.Conv2d))


def test_a_convolution_of_another_class_and_a_forward_that_is_set():
    vae = small()
    vae.decoder.conv_out.__class__ = type("Mine", (torch.nn.Conv2d,), {})
    own = vae.encoder.forward
    vae.encoder.forward = lambda x: own(x)
    report = fuse(vae)
    assert [e.name for e in report.replaced if e.became == "channels-last"] == ["decoder"]
    assert ("encoder", set_forward.ALREADY_SET) in [(e.name, e.why) for e in report.left]
    assert vae.encoder.conv_in.weight.is_contiguous() and results(vae)[0].is_contiguous()


def test_weights_that_are_not_parameters_are_left():
    vae = small()
    prune.random_unstructured(vae.decoder.conv_in, "weight", amount=0.3)
    vae.encoder.conv_in.weight = None
    fuse(vae)
    assert vae.decoder.conv_in.weight.is_contiguous() and not vae.decoder.conv_out.weight.is_contiguous()
    unfuse(vae)
    assert vae.decoder.conv_out.weight.is_contiguous()


def test_weights_that_are_moved_later_do_not_keep_others_from_being_restored():
    vae = small()
    fuse(vae)
    parametrizations.weight_norm(vae.decoder.conv_in)
    unfuse(vae)
    assert vae.decoder.conv_out.weight.is_contiguous() and "forward" not in vars(vae.decoder.conv_in)


def test_weights_stay_trainable_in_inference_mode():
    vae = small()
    for change in (fuse, unfuse):
        with torch.inference_mode():
            change(vae)
        vae.decoder(drawn(1, 4, 8, 8).bfloat16()).float().sum().backward()


LOST = (
    "AutoencoderDC",
    "AutoencoderKLAllegro",
    "AutoencoderKLHunyuanImage",
    "AutoencoderKLHunyuanImageRefiner",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLCosmos",
    "AutoencoderKLMochi",
    "AutoencoderKLLTXVideo",
)


@pytest.fixture
def of_float32(monkeypatch):
    """Layouts change for float32, too: it shows whether the same is computed."""
    monkeypatch.setattr(channels_last, "TYPES", (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("least", [0, group_norm.LEAST])
@pytest.mark.parametrize("of", LOST)
def test_functions_that_do_not_keep_the_layout(of, least, monkeypatch, of_float32):
    run_from(least, monkeypatch)
    vae = autoencoders.made(of)
    before = autoencoders.results(of, vae)
    report = fuse(vae)
    assert [e.name for e in report.replaced if e.became == "channels-last"] == ["encoder", "decoder"]
    for got, want in zip(autoencoders.results(of, vae), before, strict=True):
        assert got.shape == want.shape and distance(got, want) < 2e-5
    unfuse(vae)
    assert all(p.is_contiguous() for p in vae.parameters())
    assert all(map(torch.equal, autoencoders.results(of, vae), before))


@pytest.mark.parametrize("of", LOST)
def test_layout_between_convolutions(of, monkeypatch):
    run_from(0, monkeypatch)
    vae, seen = autoencoders.made(of).bfloat16(), []
    fuse(vae)
    for name, module in vae.decoder.named_modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.register_forward_hook(lambda m, x, y, name=name: seen.append((name, x[0], y)))
    autoencoders.results(of, vae)
    assert len(seen) >= 10
    for name, given, made in seen:
        form = FORMATS[made.dim()]
        assert made.is_contiguous(memory_format=form), name
        assert given.is_contiguous(memory_format=form), name


def test_with_gradients_the_own_code_runs():
    vae = autoencoders.made("AutoencoderKLHunyuanVideo").bfloat16()
    fuse(vae)
    made = vae.decoder(drawn(1, 16, 2, 2, 2).bfloat16())
    assert made.is_contiguous()
    made.float().sum().backward()
    assert all(m.weight.grad is not None for m in vae.decoder.modules() if isinstance(m, torch.nn.Conv3d))


def test_in_a_compiled_program():
    vae, x = small(), drawn(1, 4, 8, 12).bfloat16()
    fuse(vae)
    with torch.no_grad():
        made = torch.compile(vae.decoder, backend="eager")(x)
        assert made.is_contiguous() and torch.equal(made, vae.decoder(x))


@pytest.mark.parametrize("of", LOST)
def test_pickled_models_run_their_classes(of, of_float32):
    vae = autoencoders.made(of)
    fuse(vae)
    loaded = pickle.loads(pickle.dumps(vae))
    assert all("forward" not in vars(m) or set_forward.is_free(m) for m in loaded.modules())
    want, got = autoencoders.results(of, vae)[0], autoencoders.results(of, loaded)[0]
    assert distance(got, want) < 2e-5  # its weights stay channels-last


def test_a_part_that_is_compiled_runs_in_its_decoder():
    vae = autoencoders.made("AutoencoderKLCogVideoX").eval().bfloat16()
    fuse(vae)
    x = drawn(1, vae.config.latent_channels, 3, 2, 2).bfloat16()
    with torch.no_grad():
        want = vae.decoder(x)[0]
        vae.decoder.mid_block.compile(backend="eager")
        made = vae.decoder(x)[0]
    assert distance(made.float(), want.float()) < 0.02


@pytest.mark.parametrize("of", ["LTX", "LTX2"])
def test_convolutions_of_repeated_edges_run_other_calls_as_they_did(of):
    vae = autoencoders.made(f"AutoencoderKL{of}Video").bfloat16()
    conv = next(m for m in vae.decoder.modules() if type(m).__name__ == f"{of}VideoCausalConv3d")
    x = drawn(1, conv.in_channels, 3, 4, 5).bfloat16()
    last = x.contiguous(memory_format=torch.channels_last_3d)
    with torch.no_grad():
        own = {causal: _called(conv, last, causal) for causal in (True, False)}
    fuse(vae)
    for given, gradients in ((x, False), (last, False), (last, True)):
        for causal, want in own.items():
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(_called(conv, given, causal), want, rtol=2e-2, atol=2e-2)
    seen = []
    conv.conv.register_forward_hook(lambda m, x, y: seen.append(x[0].shape[2]))
    with torch.no_grad():
        torch.testing.assert_close(_called(conv, last, True), own[True], rtol=2e-2, atol=2e-2)
    assert seen == [3 + conv.kernel_size[0] - 1]


def test_reflection_needs_more_pixels_than_it_pads():
    vae = autoencoders.made("AutoencoderKLLTX2Video").bfloat16()
    fuse(vae)
    conv, x = vae.decoder.conv_in, drawn(1, vae.decoder.conv_in.in_channels, 2, 1, 3).bfloat16()
    with torch.no_grad(), pytest.raises(RuntimeError, match="should be less than the corresponding input dimension"):
        conv(x.contiguous(memory_format=torch.channels_last_3d))


def _called(conv: torch.nn.Module, x: torch.Tensor, causal: bool) -> torch.Tensor:
    if hasattr(conv, "is_causal"):
        conv.is_causal = causal
        return conv(x)
    return conv(x, causal=causal)


def _changed(conv, **attributes):
    for name, value in attributes.items():
        setattr(conv, name, value)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pad_mode": "replicate"},
        {"spatial_pad": (1, 0, 1, 1)},
        {"temporal_pad": 0},
        {"padding": (0, 1, 1)},
        {"stride": (2, 1, 1), "temporal_pad": 1},
        {"groups": 2},
    ],
    ids=str,
)
def test_convolutions_of_repeated_first_frames_compute_what_they_did(change):
    cosmos = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cosmos")
    torch.manual_seed(0)
    conv = cosmos.CosmosCausalConv3d(16, 8, 3, padding=1).requires_grad_(False)
    if "groups" in change:
        conv.weight = torch.nn.Parameter(conv.weight[:, :8].clone(), requires_grad=False)
    _changed(conv, **change)
    for x in (drawn(2, 16, 3, 5, 4), drawn(2, 16, 3, 5, 4).contiguous(memory_format=torch.channels_last_3d)):
        with torch.no_grad():
            want = conv(x)
            assert [e.became for e in fuse(conv).replaced] == ["edges"]
            torch.testing.assert_close(conv(x), want)
            unfuse(conv)


def test_a_norm_of_all_frames_is_no_norm_of_each():
    cosmos = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cosmos")
    for groups, became in ((1, ["", "norm"]), (2, ["norm"])):
        of = cosmos.CosmosCausalGroupNorm(8, groups)
        assert [e.name for e in fuse(of).replaced if e.became == group_norm.BECAME] == became


@pytest.mark.parametrize("shape", [(1, 16, 3, 2, 4), (1, 16, 1, 3, 3)], ids=str)
def test_attention_between_frames(shape, monkeypatch):
    hunyuan = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15")
    torch.manual_seed(0)
    attention, x = hunyuan.HunyuanVideo15AttnBlock(16), drawn(*shape)
    of_class = hunyuan.HunyuanVideo15AttnBlock.prepare_causal_attention_mask
    _, _, frames, height, width = shape
    mask = masked_attention.causal_mask(frames, height * width, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(mask[0], of_class(frames, height * width, torch.bfloat16, "cpu"))
    want, gradients = attention(x), torch.autograd.grad(attention(x).sum(), [*attention.parameters()])
    assert "attention" in [e.became for e in fuse(attention).replaced]
    with monkeypatch.context() as patched:
        patched.setattr(hunyuan.HunyuanVideo15AttnBlock, "prepare_causal_attention_mask", None)
        with torch.no_grad():
            for given in (x, x.contiguous(memory_format=torch.channels_last_3d)):
                torch.testing.assert_close(attention(given), want)
    again = torch.autograd.grad(attention(x).sum(), [*attention.parameters()])
    torch.testing.assert_close(again, gradients)
    unfuse(attention)
    assert torch.equal(attention(x), want)


def test_attention_with_another_mask_is_left():
    hunyuan = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15")

    class Other(hunyuan.HunyuanVideo15AttnBlock):
        @staticmethod
        def prepare_causal_attention_mask(n_frame, n_hw, dtype, device, batch_size=None):
            return None

    assert "attention" not in [e.became for e in fuse(Other(16)).replaced]
