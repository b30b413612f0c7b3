"""fuse of diffusers' autoencoders: each makes what it did, and is in the table of the docs. Of LTX-Video's, what has
norms of channels is joined with what follows, module by module as exact as it was."""

import pytest
import torch

import autoencoder_table
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.whole_models import stretch
from support import autoencoders
from support.group_norms import run_from
from support.video_autoencoders import distance

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


USUAL = ("AutoencoderKL", "AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLHunyuanVideo")


@pytest.mark.parametrize(
    "of", [of if of in USUAL else pytest.param(of, marks=pytest.mark.further) for of in autoencoders.SMALL]
)
def test_each_computes_what_it_did_and_is_in_the_table(of, monkeypatch):
    """Of docs/models.md."""
    if not hasattr(diffusers, of):
        pytest.skip(f"no {of} in this diffusers")
    vae = autoencoders.made(of)
    wanted = autoencoders.results(of, vae)
    text = autoencoder_table.row(of, vae, fuse(vae))
    assert text in autoencoder_table.PATH.read_text(), f"write it anew: {autoencoder_table.COMMAND}"
    run_from(0, monkeypatch)
    for made, value in zip(autoencoders.results(of, vae), wanted, strict=True):
        assert distance(made, value) < 1e-4
    unfuse(vae)
    assert all(map(torch.equal, autoencoders.results(of, vae), wanted))


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
