"""The bench of autoencoders beside WAN's."""

import pytest
import torch

from graphfuse.benchmarks.programs import vae_calls
from graphfuse.benchmarks.programs.autoencoder_cases import CASES, IMAGE, SHORT, DecodeCase
from graphfuse.benchmarks.programs.wan_vae_cases import WAYS


def test_ways_without_a_compiler_compute_the_same():
    pytest.importorskip("diffusers")
    small = IMAGE | {"block_out_channels": (32,) * 4, "layers_per_block": 1}
    case = DecodeCase("AutoencoderKL", (1, 4, 4, 4), SHORT, small)
    found = vae_calls.measure(case, {title: WAYS[title] for title in SHORT}, 2, device="cpu")
    assert all(0 < entry["error"] < 0.1 and entry["ms"]["median"] > 0 for entry in found.values()), found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latents_have_the_channels_of_the_class(case):
    diffusers = pytest.importorskip("diffusers")
    getattr(diffusers, case.kind)  # imported here: its module may make tensors, which stay where they were made
    with torch.device("meta"):
        config = case.model(torch.float32, "meta").config
    assert case.shape[1] == config.get("latent_channels", config.get("z_dim"))
