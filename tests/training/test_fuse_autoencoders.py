"""fuse of diffusers' autoencoders other than WAN's: what has norms of channels is joined with what follows, module by
module as exact as it was; what has norms of groups is left as it is, with the reason."""

import inspect

import pytest
import torch

from graphfuse.torch import fuse, unfuse
from graphfuse.torch.whole_models import stretch

pytestmark = pytest.mark.torch

diffusers = pytest.importorskip("diffusers", minversion="0.35")

LTX = {
    "block_out_channels": (16, 16, 32, 32),
    "decoder_block_out_channels": (16, 32, 32, 32),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
    "latent_channels": 8,
}
"""Blocks with and without a convolution as their shortcut."""
TIMED = LTX | {"decoder_block_out_channels": (32,) * 4, "timestep_conditioning": True}
IMAGES = {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2}
FOUR = {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "layers_per_block": 1}
OF_GROUPS = {
    "AutoencoderKL": IMAGES | {"up_block_types": ("UpDecoderBlock2D",) * 2},
    "AutoencoderKLHunyuanVideo": FOUR,
    "AutoencoderKLCogVideoX": FOUR | {"latent_channels": 4},
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32,) * 4,
        "decoder_block_out_channels": (32,) * 4,
        "layers_per_block": (1,) * 5,
    },
    "AutoencoderKLCosmos": {
        "encoder_block_out_channels": (8,) * 4,
        "decode_block_out_channels": (8,) * 4,
        "num_layers": 1,
        "latent_channels": 4,
        "attention_resolutions": (),
    },
}
GROUPS = "it normalizes channels together with all places, which are no rows along one dimension"


def made(of, **config):
    torch.manual_seed(0)
    return getattr(diffusers, of)(**config).eval()


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def calls_of(vae, module_of, *given):
    """The modules of a kind with what they are called with, and what they make."""
    seen = []
    hooks = [
        m.register_forward_hook(lambda m, args, made: seen.append((m, args, made)))
        for m in vae.modules()
        if type(m).__name__ == module_of
    ]
    with torch.no_grad():
        result = vae.encode(given[0]).latent_dist.parameters, vae.decode(*given[1:]).sample
    for hook in hooks:
        hook.remove()
    return seen, result


@pytest.mark.parametrize("config", [LTX, TIMED], ids=["ltx", "ltx with times"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_ltx_computes_what_it_did(config, layout):
    stretch._stretches.clear()
    vae = made("AutoencoderKLLTXVideo", **config).to(memory_format=layout)
    time = (torch.tensor([0.05]),) if "timestep_conditioning" in config else ()
    given = drawn(1, 3, 9, 32, 64), drawn(1, 8, 2, 2, 3), *time
    seen, wanted = calls_of(vae, "LTXVideoResnetBlock3d", *given)
    report = fuse(vae)
    of_blocks = [e.became for e in report.replaced if e.kind == "LTXVideoResnetBlock3d"]
    assert len(of_blocks) == 2 * len({m for m, _, _ in seen})
    for block, args, before in seen:
        with torch.no_grad():
            torch.testing.assert_close(block(*args), before, rtol=1e-4, atol=1e-5)
            assert block(*args).stride() == before.stride()
    _, found = calls_of(vae, "LTXVideoResnetBlock3d", *given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    chosen = {way.operations for one in stretch._stretches for ways in one.shaped.values() for way in ways}
    assert chosen >= {("rmsnorm, swish",)} | ({("rmsnorm, mul, add, swish",)} if time else set())
    unfuse(vae)
    _, back = calls_of(vae, "LTXVideoResnetBlock3d", *given)
    assert all(map(torch.equal, back, wanted))


@pytest.mark.parametrize("of", OF_GROUPS)
def test_norms_of_groups_are_left_with_the_reason(of):
    vae = made(of, **OF_GROUPS[of])
    norms = {name for name, m in vae.named_modules() if isinstance(m, torch.nn.GroupNorm)}
    report = fuse(vae)
    assert norms and {e.name: e.why for e in report.left} == dict.fromkeys(norms, GROUPS)
    assert all(inspect.getmodule(type(vae.get_submodule(e.name))) is not torch.nn for e in report.replaced)
    for name in norms:
        assert "forward" not in vars(vae.get_submodule(name))


def test_a_shortcut_that_comes_or_goes_is_that_of_the_class():
    vae = made("AutoencoderKLLTXVideo", **LTX)
    plain, shortcut = vae.decoder.mid_block.resnets[0], vae.encoder.down_blocks[1].conv_out
    given = drawn(1, 32, 2, 3, 4), drawn(1, 16, 2, 3, 4)
    fuse(vae)
    plain.norm3 = torch.nn.LayerNorm(32)
    shortcut.norm3 = None
    for block, x in zip((plain, shortcut), given, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(block(x), type(block).forward(block, x))
