"""What the bench of WAN's VAE calls, and the ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EAGER, BY_HAND, COMPILED, OURS_COMPILED, TUNED, OURS, OURS_BY_HAND = (
    "eager",
    "eager, channels-last by hand",
    "torch.compile",
    "torch.compile, our backend",
    "torch.compile (max-autotune), channels-last by hand",
    "fuse",
    "fuse, channels-last by hand",
)


@dataclass(frozen=True)
class VideoWay:
    """A way to run the VAE. name: what `--ways` calls it. make: has a model of one's own run in it. seconds: that make,
    a first call and warming up take at most; what takes longer has failed."""

    name: str
    make: Callable[[torch.nn.Module], torch.nn.Module]
    seconds: float = 120.0


@dataclass(frozen=True)
class VideoCase:
    """Decode of latents, or encode of the frames that they stand for. frames, height, width: of the latents. ways:
    those that it is measured in."""

    call: str
    frames: int
    ways: tuple[str, ...]
    height: int = 60
    width: int = 104

    def __str__(self) -> str:
        return f"{self.call}-{self.frames}x{self.height}x{self.width}"

    @property
    def shape(self) -> tuple[int, ...]:
        if self.call == "decode":
            return (1, 16, self.frames, self.height, self.width)
        return (1, 3, 4 * self.frames - 3, 8 * self.height, 8 * self.width)

    def model(self, dtype: torch.dtype, device: str, **sizes: object) -> torch.nn.Module:
        return model(dtype, device, **sizes)

    def given(self, device: str) -> torch.Tensor:
        x = drawn(self.shape, device)
        return x if self.call == "decode" else x.clamp(-1, 1)

    def called(self, vae: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.call == "decode":
            return lambda x: vae.decode(x).sample
        return lambda x: vae.encode(x).latent_dist.parameters


SHORT = (EAGER, BY_HAND, OURS)
COMPARED = (EAGER, BY_HAND, COMPILED, OURS)
CASES = (
    VideoCase("decode", 3, (EAGER, BY_HAND, COMPILED, TUNED, OURS)),
    VideoCase("decode", 21, COMPARED),
    VideoCase("encode", 3, COMPARED),
)
QUICK = (VideoCase("decode", 3, SHORT), VideoCase("encode", 3, SHORT))


def model(dtype: torch.dtype, device: str, **sizes: object) -> torch.nn.Module:
    """The VAE of WAN 2.1 with random weights, at the published widths unless `sizes` say others."""
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(7)
    made = AutoencoderKLWan(**sizes).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("gamma"):
                p.add_(torch.randn_like(p) * 0.1)
    return made.to(device, dtype)


def drawn(shape: tuple[int, ...], device: str) -> torch.Tensor:
    import torch

    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(5))


def _by_hand(vae: torch.nn.Module) -> torch.nn.Module:
    """A model whose convolutions have channels-last weights, as a user would set them."""
    import torch

    formats = {5: torch.channels_last_3d, 4: torch.channels_last}
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=formats[module.weight.dim()])
    return vae


def _compiled(vae: torch.nn.Module, **options: object) -> torch.nn.Module:
    import torch

    torch._dynamo.reset()
    for part in (vae.encoder, vae.decoder):
        part.compile(**options)
    return vae


def _fused(vae: torch.nn.Module) -> torch.nn.Module:
    from graphfuse.torch import fuse

    fuse(vae)
    return vae


WAYS: dict[str, VideoWay] = {
    EAGER: VideoWay("eager", lambda vae: vae),
    BY_HAND: VideoWay("eager_channels_last", _by_hand),
    COMPILED: VideoWay("compile", _compiled, 300.0),
    OURS_COMPILED: VideoWay("compile_graphfuse", lambda vae: _compiled(vae, backend="graphfuse"), 300.0),
    TUNED: VideoWay(
        "compile_max_autotune", lambda vae: _compiled(_by_hand(vae), mode="max-autotune-no-cudagraphs"), 480.0
    ),
    OURS: VideoWay("fuse", _fused),
    OURS_BY_HAND: VideoWay("fuse_channels_last", lambda vae: _fused(_by_hand(vae))),
}
"""By title, as records have them."""
