"""Autoencoders of diffusers for images and videos, small and with random weights: what ``fuse`` finds in each."""

from dataclasses import dataclass, field

import torch

_STAGES = (8,) * 4
_IMAGES = {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2, "norm_num_groups": 4}
_BOTH = _IMAGES | {"up_block_types": ("UpDecoderBlock2D",) * 2}
_VIDEOS = {"block_out_channels": _STAGES, "norm_num_groups": 4, "layers_per_block": 1}
_KEPT_FRAMES = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_FIVE = {"latent_channels": 4, "block_out_channels": (8,) * 5, "layers_per_block": 1}
_LTX = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": (1,) * 5, "latent_channels": 8}


@dataclass(frozen=True)
class Small:
    """A configuration, and the shape of what it encodes."""

    shape: tuple[int, ...]
    config: dict[str, object] = field(default_factory=dict)


SMALL = {
    "AutoencoderKL": Small((1, 3, 16, 24), _BOTH),
    "AsymmetricAutoencoderKL": Small(
        (1, 3, 16, 24),
        {
            "down_block_out_channels": (8, 16),
            "up_block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
        },
    ),
    "AutoencoderDC": Small(
        (1, 3, 16, 24),
        {"latent_channels": 4, "attention_head_dim": 8}
        | {f"{part}_block_types": ("ResBlock", "EfficientViTBlock") for part in ("encoder", "decoder")}
        | {f"{part}_block_out_channels": (8, 16) for part in ("encoder", "decoder")}
        | {f"{part}_layers_per_block": (1, 1) for part in ("encoder", "decoder")}
        | {f"{part}_qkv_multiscales": ((), (5,)) for part in ("encoder", "decoder")},
    ),
    "AutoencoderKLAllegro": Small((1, 3, 8, 16, 16), _VIDEOS),
    "AutoencoderKLCogVideoX": Small((1, 3, 9, 16, 16), _VIDEOS | {"latent_channels": 4}),
    "AutoencoderKLCosmos": Small(
        (1, 3, 9, 32, 32),
        {
            "encoder_block_out_channels": _STAGES,
            "decode_block_out_channels": _STAGES,
            "num_layers": 1,
            "latent_channels": 4,
            "attention_resolutions": (),
        },
    ),
    "AutoencoderKLFlux2": Small((1, 3, 16, 24), _BOTH | {"latent_channels": 4}),
    "AutoencoderKLHunyuanImage": Small(
        (1, 3, 32, 32),
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32,) * 4,
            "layers_per_block": 1,
            "spatial_compression_ratio": 8,
            "sample_size": 32,
        },
    ),
    "AutoencoderKLHunyuanImageRefiner": Small((1, 3, 5, 32, 32), _FIVE),
    "AutoencoderKLHunyuanVideo": Small((1, 3, 9, 16, 16), _VIDEOS),
    "AutoencoderKLHunyuanVideo15": Small((1, 3, 5, 32, 32), _FIVE),
    "AutoencoderKLKVAE": Small(
        (1, 3, 16, 24),
        {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 1)},
    ),
    "AutoencoderKLKVAEVideo": Small(
        (1, 3, 5, 16, 16), {"ch": 32, "ch_mult": (1, 1, 1), "num_res_blocks": 1, "z_channels": 4}
    ),
    "AutoencoderKLLTX2Video": Small(
        (1, 3, 9, 64, 64),
        _LTX
        | {"block_out_channels": (8, 16, 32, 64)}
        | {"decoder_block_out_channels": (8, 16, 32), "decoder_layers_per_block": (1,) * 4},
    ),
    "AutoencoderKLLTXVideo": Small(
        (1, 3, 9, 32, 64),
        _LTX | {"decoder_block_out_channels": (16, 32, 32, 32), "decoder_layers_per_block": (1,) * 5},
    ),
    "AutoencoderKLMagvit": Small((1, 3, 5, 16, 16), _VIDEOS | {"latent_channels": 4}),
    "AutoencoderKLMochi": Small(
        (1, 3, 7, 16, 16),
        {
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "layers_per_block": (1,) * 5,
        },
    ),
    "AutoencoderKLQwenImage": Small((1, 3, 5, 16, 16), _KEPT_FRAMES),
    "AutoencoderKLQwenImage21": Small(
        (1, 3, 1, 32, 32),
        _KEPT_FRAMES | {"decoder_base_dim": 8, "dim_mult": [1, 1, 2, 2, 2], "in_channels": 3, "out_channels": 3},
    ),
    "AutoencoderKLTemporalDecoder": Small(
        (2, 3, 16, 24), {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2}
    ),
    "AutoencoderKLWan": Small((1, 3, 5, 16, 16), _KEPT_FRAMES),
    "AutoencoderTiny": Small(
        (1, 3, 16, 24),
        {f"{part}_block_out_channels": (8, 8) for part in ("encoder", "decoder")}
        | {f"num_{part}_blocks": (1, 1) for part in ("encoder", "decoder")},
    ),
    "AutoencoderVidTok": Small((1, 3, 5, 16, 16), {"ch": 32, "ch_mult": [1, 1, 1], "num_res_blocks": 1}),
    "Kandinsky6SRVAE": Small(
        (1, 3, 5, 32, 32),
        {"latent_channels": 4, "layers_per_block": 1}
        | {f"{part}_block_out_channels": (8,) * 5 for part in ("encoder", "decoder")},
    ),
    "VQModel": Small((1, 3, 16, 24), _BOTH),
}
"""By the name of the class."""


def made(of: str) -> torch.nn.Module:
    """A model in eval mode, its vectors away from ones and zeros."""
    import diffusers

    torch.manual_seed(0)
    vae = getattr(diffusers, of)(**SMALL[of].config).eval()
    with torch.no_grad():
        for p in vae.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.05)
    return vae


def results(of: str, vae: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What it makes of noise: latents, and what these are decoded to."""
    x = torch.randn(SMALL[of].shape, generator=torch.Generator().manual_seed(1)).to(vae.dtype)
    with torch.no_grad():
        if of == "AutoencoderKLAllegro":  # which encodes and decodes in large tiles alone
            latents = vae.encoder(x)
            return latents, vae.decoder(latents[:, :4])
        encoded = vae.encode(x)
        encoded = getattr(encoded, "latent_dist", None) or encoded
        latents = next((t for name in ("latents", "latent") if (t := getattr(encoded, name, None)) is not None), None)
        latents = encoded.mode() if latents is None else latents
        frames = {"num_frames": SMALL[of].shape[0]} if of == "AutoencoderKLTemporalDecoder" else {}
        decoded = vae.decode(latents, **frames)
        return latents, getattr(decoded, "sample", decoded)
