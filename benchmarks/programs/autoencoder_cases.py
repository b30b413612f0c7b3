"""Autoencoders of diffusers beside WAN's, at published widths with random weights, and what they decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphfuse.benchmarks.programs import wan_vae_cases
from graphfuse.benchmarks.programs.wan_vae_cases import BY_HAND, COMPILED, EAGER, OURS, OURS_BY_HAND, OURS_COMPILED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DecodeCase:
    """Decode of latents by a class of diffusers. shape: of the latents. ways: those that it is measured in. arguments:
    of the class, beside its own defaults."""

    kind: str
    shape: tuple[int, ...]
    ways: tuple[str, ...]
    arguments: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"decode {self.kind} {'x'.join(map(str, self.shape))}"

    def model(self, dtype: torch.dtype, device: str, **sizes: object) -> torch.nn.Module:
        import diffusers
        import torch

        torch.manual_seed(7)
        return getattr(diffusers, self.kind)(**(dict(self.arguments) | sizes)).eval().to(device, dtype)

    def given(self, device: str) -> torch.Tensor:
        return wan_vae_cases.drawn(self.shape, device)

    def called(self, vae: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.kind == "AutoencoderKLAllegro":  # whose decode is of tiles
            return lambda x: vae.decoder(x)
        return lambda x: vae.decode(x).sample


# Of Stable Diffusion; later models have the same decoder but for the number of latent channels.
IMAGE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}
# Of the first DC-AE with 32-fold compression, and of Sana's, which resamples otherwise.
COMPRESSING = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        "block_out_channels": (128, 256, 512, 512, 1024, 1024),
        "layers_per_block": (2, 2, 2, 3, 3, 3) if part == "encoder" else (3,) * 6,
        "qkv_multiscales": ((),) * 3 + ((5,),) * 3,
    }.items()
}
OF_SANA = COMPRESSING | {"upsample_block_type": "interpolate", "downsample_block_type": "conv"}
OF_IMAGES = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 64,
    "block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "layers_per_block": 2,
    "spatial_compression_ratio": 32,
    "sample_size": 384,
}
SHORT = (EAGER, BY_HAND, OURS, OURS_BY_HAND)
ALL = (*SHORT, COMPILED, OURS_COMPILED)
CASES = (
    DecodeCase("AutoencoderKL", (1, 4, 64, 64), ALL, IMAGE),
    DecodeCase("AutoencoderKL", (1, 4, 128, 128), ALL, IMAGE),
    DecodeCase("AutoencoderKL", (4, 4, 64, 64), SHORT, IMAGE),
    DecodeCase("AutoencoderKLHunyuanVideo", (1, 16, 5, 32, 32), ALL),
    DecodeCase("AutoencoderKLCogVideoX", (1, 16, 3, 30, 45), ALL),
    DecodeCase("AutoencoderKLQwenImage", (1, 16, 1, 128, 128), ALL),
    DecodeCase("AutoencoderKLLTXVideo", (1, 128, 5, 16, 24), ALL),
    DecodeCase("AutoencoderKLLTX2Video", (1, 128, 5, 16, 24), ALL),
    DecodeCase("AutoencoderKLMochi", (1, 12, 3, 30, 45), ALL),
    DecodeCase("AutoencoderKLCosmos", (1, 16, 3, 30, 45), ALL),
    DecodeCase("AutoencoderDC", (1, 32, 16, 16), ALL, COMPRESSING),
    DecodeCase("AutoencoderDC", (1, 32, 32, 32), ALL, OF_SANA),
    DecodeCase("AutoencoderKLHunyuanImage", (1, 64, 32, 32), ALL, OF_IMAGES),
    DecodeCase("AutoencoderKLHunyuanVideo15", (1, 32, 3, 16, 24), ALL),
    DecodeCase("AutoencoderKLAllegro", (1, 4, 3, 40, 40), ALL),
)
