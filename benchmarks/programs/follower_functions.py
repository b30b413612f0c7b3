"""The functions of the bench of what stands around norms, as models write them in torch, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from graphfuse.benchmarks.programs.follower_cases import BLOCK, BOTH, CAP, RATE, FollowerCase, RowFunction

Tensors = Mapping[str, Tensor]

SAMPLES = 4
EPS, LARGEST = 1e-5, 448.0


def tensors(function: RowFunction, case: FollowerCase, seed: int, device: str) -> dict[str, Tensor]:
    """Arguments of a function by name, drawn anew for each seed; with gradients, where the case has them.

    x, r, g: rows. w, v, b: vectors, W one in float32. c, s, t: a number for each column of a sample; SAMPLES have all
    rows then. m: a mask. n: numbers of columns. q: a scale of FP8.
    """
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, function.dtype)
    samples = (SAMPLES,) * ("c" in function.given)
    many = (*samples, case.rows // (SAMPLES if samples else 1), case.columns)
    few, vector = (*samples, 1, case.columns), (case.columns,)
    shapes = dict.fromkeys("xrgmn", many) | dict.fromkeys("cst", few) | dict.fromkeys("wvbW", vector)

    def drawn(name: str) -> Tensor:
        if name == "q":
            return torch.full((), 0.02, device=device)
        made = torch.randn(shapes[name], device=device, generator=generator)
        if name in "mn":
            return made < -1 if name == "m" else made.argmax(-1)
        return (made if name in "xrg" else 0.1 * made + (name in "wvW")).to(torch.float32 if name == "W" else dtype)

    made = {name: drawn(name) for name in function.given.split()}
    for name, t in made.items():
        t.requires_grad_(case.work == BOTH and t.is_floating_point() and name != "q")
        if function.is_dynamic and name in "xrg":
            torch._dynamo.mark_dynamic(t, 0)
    return made


# The functions. What is written here is what models write.


def rms(x, w):
    """RMSNorm of transformers' Llama: rounded to x's type before the weight."""
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layer(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def dropout(x):
    return F.dropout(x, RATE)


def fp8(y, scale):
    return (y / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def fp8_by_row(y):
    scale = y.abs().amax(-1, keepdim=True).float().clamp(min=1e-4) / LARGEST
    return fp8(y.float(), scale), scale


def fp8_by_block(y):
    blocks = y.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST
    return fp8(blocks, scale).flatten(-2), scale.squeeze(-1)


def fp8_by_tensor(y):
    scale = y.abs().amax().float().clamp(min=1e-4) / LARGEST
    return fp8(y.float(), scale), scale


def mx(y):
    """FP8 with a power of two for each block of 32."""
    blocks = y.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100))) - 8
    return fp8(blocks, torch.exp2(exponent)).flatten(-2), exponent.squeeze(-1)


def int8_by_row(y):
    scale = y.abs().amax(-1, keepdim=True).float().clamp(min=1e-4) / 127
    return torch.round(y.float() / scale).clamp(-128, 127).to(torch.int8), scale


def token_log_probability(x, n):
    return F.log_softmax(x.float(), -1).gather(-1, n[..., None]).squeeze(-1)


def entropy(x):
    log = F.log_softmax(x.float(), -1)
    return -(log.exp() * log).sum(-1)


def divergence(x, r):
    """Kullback and Leibler's, of x's distribution from r's."""
    log, other = F.log_softmax(x.float(), -1), F.log_softmax(r.float(), -1)
    return (other.exp() * (other - log)).sum(-1)


def rms_and_gelu(x, w):
    y = rms(x, w)
    return y, F.gelu(y)


def add_rms(x, r, w):
    total = x + r
    return rms(total, w), total


def add_rms_fp8_by_row(x, r, w):
    total = x + r
    return *fp8_by_row(rms(total, w)), total


def add_two_rms(x, r, w, v):
    total = x + r
    return rms(total, w), rms(total, v)


def rms_add_rms(x, r, w, v):
    total = rms(x, w) + r
    return rms(total, v), total


def dropout_add_rms(x, r, w, dropout=dropout):
    total = r + dropout(x)
    return rms(total, w), total


def add_layer(x, r, w, b):
    total = x + r
    return layer(total, w, b), total


def add_adaptive(x, r, c, s, t):
    total = r + c * x
    return F.layer_norm(total, total.shape[-1:], eps=EPS) * (1 + s) + t, total


def masked_softmax(x, m):
    return F.softmax((x * x.shape[-1] ** -0.5).masked_fill(m, float("-inf")), -1)


RUNS: dict[str, Callable[..., object]] = {
    "rms": rms,
    "rms-half": rms,
    "rms-float-weight": lambda x, W: rms(x, W).to(x.dtype),
    "rms-gelu": lambda x, w: F.gelu(rms(x, w)),
    "rms-gelu-tanh": lambda x, w: F.gelu(rms(x, w), approximate="tanh"),
    "rms-gelu-dynamic": lambda x, w: F.gelu(rms(x, w)),
    "rms-relu2": lambda x, w: F.relu(rms(x, w)) ** 2,
    "rms-tanh": lambda x, w: torch.tanh(rms(x, w)),
    "rms-silu": lambda x, w: F.silu(rms(x, w)),
    "rms-swiglu": lambda x, g, w: F.silu(rms(x, w)) * g,
    "rms-fp8": lambda x, w, q: fp8(rms(x, w), q),
    "rms-fp8-row": lambda x, w: fp8_by_row(rms(x, w)),
    "rms-fp8-block": lambda x, w: fp8_by_block(rms(x, w)),
    "rms-add": lambda x, r, w: rms(x, w) + r,
    "rms-dropout": lambda x, w, dropout=dropout: dropout(rms(x, w)),
    "rms-and-gelu": rms_and_gelu,
    "gelu-rms": lambda x, w: rms(F.gelu(x), w),
    "add-rms": add_rms,
    "add-rms-alone": lambda x, r, w: rms(x + r, w),
    "add-rms-gelu": lambda x, r, w: F.gelu(rms(x + r, w)),
    "add-rms-fp8-row": add_rms_fp8_by_row,
    "add-two-rms": add_two_rms,
    "rms-add-rms": rms_add_rms,
    "dropout-add-rms": dropout_add_rms,
    "layer": layer,
    "layer-gelu": lambda x, w, b: F.gelu(layer(x, w, b)),
    "layer-fp8": lambda x, w, b, q: fp8(layer(x, w, b), q),
    "layer-add": lambda x, r, w, b: layer(x, w, b) + r,
    "add-layer": add_layer,
    "add-layer-alone": lambda x, r, w, b: layer(x + r, w, b),
    "add-adaptive": add_adaptive,
    "l2": lambda x: F.normalize(x, dim=-1),
    "l2-scaled": lambda x, w: F.normalize(x, dim=-1) * w,
    "softmax": lambda x: F.softmax(x, -1),
    "log-softmax": lambda x: F.log_softmax(x, -1),
    "masked-softmax": masked_softmax,
    "cross-entropy": lambda x, n: F.cross_entropy(x.float(), n),
    "capped-cross-entropy": lambda x, n: F.cross_entropy((CAP * torch.tanh(x / CAP)).float(), n),
    "token-logp": token_log_probability,
    "entropy": entropy,
    "divergence": divergence,
    "cosine": lambda x, r: F.cosine_similarity(x.float(), r.float(), dim=-1),
    "huber": lambda x, r: F.smooth_l1_loss(x.float(), r.float(), reduction="none").mean(-1),
    "int8-row": lambda x: int8_by_row(x),
    "rms-int8-row": lambda x, w: int8_by_row(rms(x, w)),
    "rms-mx": lambda x, w: mx(rms(x, w)),
    "fp8-tensor": lambda x: fp8_by_tensor(x),
}
"""Functions by name."""


def is_kept(outputs: Sequence[Tensor], given: Tensors) -> Tensor:
    """Where a sum is nearer to one with x, whose dropout is before it, than to one without."""
    added = outputs[1].float() - given["r"].float()
    return (added - given["x"].float() / (1 - RATE)).abs() < added.abs()


KEPT: dict[str, Callable[[Sequence[Tensor], Tensors], Tensor]] = {
    "rms-dropout": lambda outputs, given: outputs[0] != 0,
    "dropout-add-rms": is_kept,
}
"""Which elements a function that drops some has kept, by its results and what it was given."""
