"""The bench of autoencoders beside WAN's."""

import pytest
import torch

from graphfuse.benchmarks.programs import vae_calls
from graphfuse.benchmarks.programs.autoencoder_cases import CASES, IMAGE, SHORT, DecodeCase
from graphfuse.benchmarks.programs.wan_vae_cases import COMPILED, EAGER, OURS, WAYS


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


def test_decodes_that_every_way_was_measured_in_are_compared():
    def ways(**ms) -> dict[str, dict]:
        names = {"eager": EAGER, "compiled": COMPILED, "ours": OURS}
        return {names[of]: {"ms": {"median": a}, "graph_ms": b and {"median": b}} for of, (a, b) in ms.items()}

    wan = {"cases": [{"name": "decode-3x60x104", "ways": ways(eager=(6, 5), compiled=(3, None), ours=(2, 1))}]}
    cases = [
        {"name": "decode AutoencoderKL 1x4x8x8", "ways": ways(eager=(9, 8), compiled=(4, 3), ours=(2, 1))},
        {"name": "decode AutoencoderDC 1x4x8x8", "ways": ways(eager=(9, 8), ours=(2, 1))},
        {"name": "encode AutoencoderKL 1x4x8x8", "ways": ways(eager=(9, 8), compiled=(4, 3), ours=(2, 1))},
    ]
    assert vae_calls.compared([wan, {"cases": cases}]).rows == [
        ("AutoencoderKLWan 3x60x104", "6.0", "3.0", "2.0", "1.50×", "-"),
        ("AutoencoderKL 1x4x8x8", "9.0", "4.0", "2.0", "2.00×", "3.00×"),
    ]
