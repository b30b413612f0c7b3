"""Latents to frames, by the VAE of WAN as diffusers has it, with its modules fused. Needs diffusers.

Weights are random here, and on a CPU widths are small; `AutoencoderKLWan.from_pretrained(..., subfolder="vae")` loads
published ones. The frames are held against those of the unfused model.
"""

import torch
from diffusers import AutoencoderKLWan

from graphfuse.torch import fuse, unfuse

on_gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
torch.manual_seed(0)
vae = AutoencoderKLWan() if on_gpu else AutoencoderKLWan(base_dim=8, num_res_blocks=1)
vae = vae.to(device, dtype).eval()
shape = (1, 16, 3, 60, 104) if on_gpu else (1, 16, 3, 4, 6)  # [samples, channels, frames, height / 8, width / 8]
mean, std = (
    torch.tensor(v, device=device, dtype=dtype).view(1, -1, 1, 1, 1)
    for v in (vae.config.latents_mean, vae.config.latents_std)
)


@torch.no_grad()
def decoded(latents: torch.Tensor) -> torch.Tensor:
    """Frames of bytes, [samples, frames, height, width, colours], of latents as a diffusion model makes them."""
    video = vae.decode(latents * std + mean).sample
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)


latents = torch.randn(shape, device=device, dtype=dtype)
print(fuse(vae))
frames = decoded(latents)
print("frames", *frames.shape)

unfuse(vae)
far = (frames.int() - decoded(latents).int()).abs().float().mean().item()
print(f"the mean difference of 255 is {far:.3f}:", "fused and unfused agree" if far < 2 else "the result is wrong")
