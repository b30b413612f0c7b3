"""Queries and keys of a layer, normalized and rotated in one kernel; keys and values to a paged cache; gradients.

On a GPU the sizes are those of a layer of Qwen3 8B with 2048 tokens.
"""

import torch

from graphfuse import functional
from graphfuse.torch import qk_norm_rope

EPS, THETA = 1e-6, 1e6
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens, heads, groups, size = (2048, 32, 8, 128) if device == "cuda" else (24, 4, 2, 64)
page = 16

torch.manual_seed(0)
qkv = torch.randn(tokens, heads + 2 * groups, size, device=device).bfloat16()
q, k, v = qkv.split((heads, groups, groups), dim=1)
q_weight, k_weight = (1 + 0.1 * torch.randn(2, size, device=device)).bfloat16()
angles = torch.outer(torch.arange(4096.0), THETA ** (-torch.arange(0, size, 2) / size))
cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
positions = torch.arange(tokens, device=device)


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By torch, in float32."""
    y = torch.nn.functional.rms_norm(x.float(), (size,), weight.float(), EPS)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    one, two = y.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


want_q, want_k = expected(q, q_weight), expected(k, k_weight)

pages = -(-tokens // page) + 1
k_cache, v_cache = (torch.zeros(pages, page, groups, size, dtype=torch.bfloat16, device=device) for _ in range(2))
slots = torch.arange(tokens, device=device) + page  # behind the first page
rotated = functional.qk_norm_rope_cache(
    q, k, v, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slots, EPS
)
functional.qk_norm_rope(q, k, q_weight, k_weight, cos_sin_cache, positions, EPS, q_out=q, k_out=k)

for made, want in ((rotated, want_q), (q, want_q), (k, want_k), (k_cache.flatten(0, 1)[slots], want_k)):
    torch.testing.assert_close(made.float(), want, rtol=2**-7, atol=1e-2)
assert torch.equal(v_cache.flatten(0, 1)[slots], v) and not v_cache[0].any()

# In FP8 the cache has keys and values over a scale, by which attention multiplies.
k_codes, v_codes = (torch.zeros_like(t, dtype=torch.float8_e4m3fn) for t in (k_cache, v_cache))
scales = {"k_scale": torch.tensor([0.05], device=device), "v_scale": torch.tensor([0.02], device=device)}
given = q, k, v, q_weight, k_weight, cos_sin_cache, positions
functional.qk_norm_rope_cache(*given, k_codes, v_codes, slots, EPS, **scales)
torch.testing.assert_close(v_codes.flatten(0, 1)[slots].float() * scales["v_scale"], v.float(), rtol=2**-4, atol=1e-3)

# For training: the same kernel forward, and one for the gradients of each.
leaves = [t.float().requires_grad_() for t in (q, k, q_weight, k_weight)]
made = qk_norm_rope(*leaves, cos_sin_cache, positions, EPS)
gradients = torch.autograd.grad(sum(y.square().sum() for y in made), leaves)
want = expected(leaves[0], leaves[2]), expected(leaves[1], leaves[3])
for got, by_torch in zip(gradients, torch.autograd.grad(sum(y.square().sum() for y in want), leaves), strict=True):
    torch.testing.assert_close(got, by_torch, rtol=1e-3, atol=1e-3 * by_torch.abs().max().item())
print(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} agree with torch, gradients too; {pages} pages of a cache")
