"""The transformer of WAN of diffusers, small and with random weights, and what it is called with."""

import torch

_FULL = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
"""Names of what `from_pretrained` keeps in float32."""


def wan(dtype=torch.bfloat16, **more):
    """In eval mode; its norms and biases away from ones and zeros."""
    import diffusers

    torch.manual_seed(0)
    small = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 32}
    small |= {"freq_dim": 16, "ffn_dim": 96, "num_layers": 2, "cross_attn_norm": True}
    made = diffusers.WanTransformer3DModel(**small | more).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.1)
    for name, p in made.named_parameters():
        if not any(kept in name for kept in _FULL):
            p.data = p.data.to(dtype)
    return made


def given(samples=1, dtype=torch.bfloat16, each_token=False, frames=2):
    """Latents, times and texts of a call. each_token: whether each token has its time, as in WAN 2.2."""
    source = torch.Generator().manual_seed(samples)
    drawn = lambda *shape: torch.randn(shape, generator=source).to(dtype)  # noqa: E731
    times = torch.arange(samples * 6 * frames).view(samples, -1) if each_token else torch.arange(samples) * 7 + 5
    return {
        "hidden_states": drawn(samples, 4, frames, 4, 6),
        "timestep": times,
        "encoder_hidden_states": drawn(samples, 7, 32),
        "return_dict": False,
    }
