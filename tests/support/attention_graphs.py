"""Attention in graphs that torch compiles, and what is compared of it."""

import torch
from torch.nn import functional as F

from graphfuse.torch import compile_report

NAME = "scaled_dot_product_attention"
N = 6
"""Tokens."""
CAUSED = "causal: no mask"


def heads(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(queries=N, keys=N, kv_heads=4, dtype=torch.float32):
    shapes = (2, 4, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)
    return tuple(heads(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def checked(function, *inputs, dynamic=None):
    """Compiles and compares values and gradients. Returns what the report says of attention."""
    torch.compiler.reset()  # as sizes would vary for torch otherwise
    mine, own = ([t.clone().requires_grad_(t.is_floating_point()) for t in inputs] for _ in range(2))
    run = torch.compile(function, backend="graphfuse", fullgraph=True, dynamic=dynamic, options={"then": "aot_eager"})
    got, want = run(*mine), function(*own)
    torch.testing.assert_close(got, want)
    of = [t for t in own if t.requires_grad]
    wanted = torch.autograd.grad(want.square().sum(), of, allow_unused=True)
    found = torch.autograd.grad(got.square().sum(), [t for t in mine if t.requires_grad], allow_unused=True)
    for grad, other in zip(found, wanted, strict=True):
        assert (grad is None) == (other is None)
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)
    return [(e.became, e.why) for e in compile_report().graphs[-1].entries]


def with_mask(make, **more):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(), **more)


def expanded(t):
    return t[:, :, None].expand(2, 2, 2, N, 8).reshape(2, 4, N, 8)
