"""The VAE of WAN on a GPU: what it makes, what moves in it, and as a CUDA graph."""

import pytest
import torch

from graphfuse.benchmarks.programs import kernel_times
from graphfuse.torch import fuse
from graphfuse.torch.operators import convolution
from support.video_autoencoders import distance, drawn, wan

pytest.importorskip("diffusers", minversion="0.35")
pytestmark = pytest.mark.gpu

WIDTH = {"base_dim": 96, "z_dim": 16, "num_res_blocks": 2, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
"""The published widths."""


def decoded(vae, latents):
    with torch.no_grad():
        return vae.decode(latents).sample


@pytest.fixture(scope="module")
def latents():
    return drawn(1, 16, 3, 12, 20).cuda().bfloat16()


@pytest.fixture(scope="module")
def exact(latents):
    """What the model makes in float32."""
    return decoded(wan(**WIDTH).cuda(), latents.float())


@pytest.fixture(scope="module")
def fused(latents, exact):
    """The model in bfloat16, fused, and how far from float32's its own decode was before."""
    half = wan(**WIDTH).cuda().bfloat16()
    far = (decoded(half, latents).float() - exact).norm()
    assert {e.name for e in fuse(half).replaced} >= {"encoder", "decoder"}
    return half, far


def test_it_is_as_close_to_float32_as_the_model(fused, latents, exact):
    half, far = fused
    assert (decoded(half, latents).float() - exact).norm() <= 1.05 * far


def test_no_convolution_changes_a_layout_in_the_decoder(fused, latents, monkeypatch):
    """With torch's convolutions. cuDNN's engine is free to convert the part of a weight that a chunk reads."""
    half, _ = fused
    monkeypatch.setattr(convolution, "why_not_engine", lambda: "it is off")
    monkeypatch.setattr(convolution, "_plans", {})
    with torch.no_grad():
        given, kept = latents.contiguous(memory_format=torch.channels_last_3d), [None] * 40
        half.decoder(given[:, :, :1], kept, [0], True)
        kernels = kernel_times.taken(lambda: half.decoder(given[:, :, 1:2], kept, [0]))
    assert any(kernel_times.kind(name) == "convolution" for name in kernels)
    # What cuDNN pads are the three channels that the last convolution makes.
    assert not [name for name in kernels if "nchwToNhwc" in name or "nhwcToNchw" in name]


def test_a_decode_is_captured(fused, latents):
    half, _ = fused
    for _ in range(3):  # cuDNN's plans are measured, kernels compiled
        wanted = decoded(half, latents)
    graph, given = torch.cuda.CUDAGraph(), latents.clone()
    with torch.cuda.graph(graph):
        made = decoded(half, given)
    given.copy_(-latents)
    graph.replay()
    assert torch.equal(made, decoded(half, -latents))
    given.copy_(latents)
    graph.replay()
    assert distance(made.float(), wanted.float()) < 1e-2


@pytest.mark.parametrize(("extent", "is_measured"), [(64, False), (512, True)])
def test_torchs_plans_of_large_convolutions_are_measured(extent, is_measured, monkeypatch):
    measured, own = [], convolution.measured_plans
    monkeypatch.setattr(convolution, "why_not_engine", lambda: "it is off")
    monkeypatch.setattr(convolution, "_plans", {})
    monkeypatch.setattr(convolution, "measured_plans", lambda: measured.append(extent) or own())
    image, weight = drawn(1, 128, extent, extent), drawn(128 * 6, 128, 3, 3)
    image, weight = (t.cuda().bfloat16().contiguous(memory_format=torch.channels_last) for t in (image, weight))
    got = convolution.convolution(image, weight, padding=1)
    want = torch.nn.functional.conv2d(image.float(), weight.float(), padding=1)
    assert float((got.float() - want).norm() / want.norm()) < 2**-7
    assert bool(measured) == is_measured
