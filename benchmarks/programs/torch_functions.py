"""Functions of rows and of images that models and losses have, as torch programs write them, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from graphfuse.benchmarks.programs.follower_functions import (
    divergence,
    entropy,
    fp8_by_row,
    fp8_by_tensor,
    int8_by_row,
    mx,
    token_log_probability,
)

ROWS, COLUMNS, CLASSES = 4096, 4096, 32000
HALF, FULL = torch.bfloat16, torch.float32


class Draw:
    """Draws tensors of random numbers on a device, the same ones for a seed."""

    def __init__(self, device: str, seed: int) -> None:
        self._device, self._generator = device, torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
        """last: whether channels are last in memory."""
        made = torch.randn(shape, device=self._device, generator=self._generator).to(dtype)
        return made.contiguous(memory_format=torch.channels_last) if last else made

    def numbers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, device=self._device, generator=self._generator)


@dataclass(frozen=True)
class TorchFunction:
    """name: in tables. run: the function. draw: makes its arguments. trains: whether it is measured with gradients of
    all that have some."""

    name: str
    run: Callable[..., object]
    draw: Callable[[Draw], tuple[Tensor, ...]]
    trains: bool = False


def rms(x: Tensor, w: Tensor) -> Tensor:
    """RMSNorm of transformers' Llama."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gemma(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w.float())).to(x.dtype)


def spelled_layer_norm(x, w, b, dim=-1):
    mean = x.mean(dim, keepdim=True)
    variance = (x - mean).pow(2).mean(dim, keepdim=True)
    w, b = (t.view(-1, 1, 1) if dim == 1 else t for t in (w, b))
    return w * ((x - mean) / torch.sqrt(variance + 1e-5)) + b


def layer_scale(x, y, gamma, w, b):
    total = x + y * gamma
    return total, F.layer_norm(total, x.shape[-1:], w, b)


def dit(x, y, gate, scale, shift):
    total = x + gate * y
    return total, F.layer_norm(total, x.shape[-1:]) * (1 + scale) + shift


def halves(function):
    return lambda x, *others: function(*x.chunk(2, -1), *others)


def selected_logp(x, n):
    return x.gather(-1, n[..., None]).squeeze(-1) - torch.logsumexp(x, -1)


def jensen_shannon(a, b):
    p, q = a.float().softmax(-1), b.float().softmax(-1)
    middle = (p + q) / 2
    return 0.5 * ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1))


def z_loss(x, n):
    wide = x.float()
    return F.cross_entropy(wide, n) + 1e-4 * torch.logsumexp(wide, -1).pow(2).mean()


def dice(x, y):
    p, t = x.float().sigmoid(), y.float().sigmoid()
    return 1 - 2 * (p * t).sum(-1) / (p.sum(-1) + t.sum(-1) + 1e-6)


def pearson(x, y):
    x, y = (t.float() - t.float().mean(-1, keepdim=True) for t in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1) + 1e-6)


def byol(a, b):
    return 2 - 2 * (F.normalize(a.float(), dim=-1) * F.normalize(b.float(), dim=-1)).sum(-1)


def triplet(a, p, n):
    return F.relu((a - p).float().pow(2).sum(-1) - (a - n).float().pow(2).sum(-1) + 1.0)


def alibi(x, slope):
    place = torch.arange(x.shape[-1], device=x.device)
    bias = slope.float()[:, None, None] * (place[None, :] - place[:, None]).abs()
    return F.softmax(x.float() * 0.125 - bias, -1).to(x.dtype)


def causal(x):
    seen = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return F.softmax(x.masked_fill(~seen, float("-inf")), -1)


def min_p(x):
    p = x.float().softmax(-1)
    return p.masked_fill(p < 0.05 * p.amax(-1, keepdim=True), 0.0)


def standardized(w):
    variance, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True, unbiased=False)
    return (w - mean) * torch.rsqrt(variance + 1e-5)


def rows(count: int, *vectors: int):
    """Draws so many tensors of rows, and so many vectors of columns."""
    return lambda d: (*(d(ROWS, COLUMNS) for _ in range(count)), *(d(COLUMNS) for _ in range(sum(vectors))))


def of(*shapes: tuple[int, ...], **options):
    return lambda d: tuple(d(*shape, **options) for shape in shapes)


def logits(d):
    return (d(ROWS, CLASSES),)


def labelled(d):
    return d(ROWS, CLASSES), d.numbers(CLASSES, ROWS)


def both(name, run, draw) -> tuple[TorchFunction, TorchFunction]:
    """A function, and the same with its backward."""
    return TorchFunction(name, run, draw), TorchFunction(f"{name}, with backward", run, draw, trains=True)


_one = TorchFunction
_heads, _gates = ((4, 2048, 32, 128), (4, 2048, 8, 128)), (4, 1, 4096)
_scores, _images = (2, 16, 1024, 1024), (1, 128, 512, 512)

FUNCTIONS = (
    # Norms.
    *both("Gemma's RMSNorm", gemma, rows(1, 1)),
    *both("SiLU(z) · x → RMSNorm", lambda x, z, w: rms(x * F.silu(z), w), rows(2, 1)),
    *both("GEGLU → RMSNorm", halves(lambda a, b, w: rms(F.gelu(a) * b, w)), of((ROWS, 2 * COLUMNS), (COLUMNS,))),
    *both("RMSNorm of queries, of keys", lambda q, k, a, b: (rms(q, a), rms(k, b)), of(*_heads, (128,), (128,))),
    _one("RMSNorm → GELU and tanh", lambda x, w: (F.gelu(rms(x, w)), torch.tanh(rms(x, w))), rows(1, 1)),
    _one(
        "RMSNorm of heads · SiLU(gate)", lambda x, z, w: rms(x, w) * F.silu(z), of(*[(4, 2048, 16, 128)] * 2, (16, 128))
    ),
    _one(
        "RMSNorm of a part of the columns, joined",
        lambda x, w: torch.cat((rms(x[:, :512], w), x[:, 512:]), -1),
        of((ROWS, 576), (512,)),
    ),
    _one("sum of RMSNorm, with backward", lambda x, w: rms(x, w).float().sum(-1), rows(1, 1), True),
    *both("layer norm spelled out", spelled_layer_norm, rows(1, 2)),
    _one(
        "layer norm in float32, with backward",
        lambda x, w: F.layer_norm(x, x.shape[-1:], w),
        of((ROWS, COLUMNS), (COLUMNS,), dtype=FULL),
        True,
    ),
    _one("layer norm of 64, with backward", lambda x, w: F.layer_norm(x, (64,), w), of((8, 1024, 64, 64), (64,)), True),
    *both("layer norm of 96", lambda x, w, b: F.layer_norm(x, (96,), w, b), of((8, 3136, 96), (96,), (96,))),
    _one(
        "layer norm of 12,288 → GELU",
        lambda x, w, b: F.gelu(F.layer_norm(x, x.shape[-1:], w, b)),
        of((2048, 12288), (12288,), (12288,)),
    ),
    *both("x + y · gamma → layer norm, both", layer_scale, of(*[(8, 1024, 1024)] * 2, *[(1024,)] * 3)),
    *both(
        "adaptive layer norm of 16 samples",
        lambda x, scale, shift: F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift,
        of((16, 256, 1152), *[(16, 1, 1152)] * 2),
    ),
    *both("x + gate · y → adaptive layer norm, both", dit, of(*[(4, 2048, 4096)] * 2, *[_gates] * 3)),
    _one(
        "layer norm of (C, H, W)",
        lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b),
        of((64, 256, 32, 32), *[(256, 32, 32)] * 2),
    ),
    *both(
        "layer norm of channels, spelled out",
        lambda x, w, b: spelled_layer_norm(x, w, b, 1),
        of((8, 256, 56, 56), (256,), (256,)),
    ),
    _one(
        "pixel norm → leaky ReLU",
        lambda x: F.leaky_relu(x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-8), 0.2),
        of((16, 512, 64, 64)),
    ),
    _one("group norm → SiLU", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), of(_images, (128,), (128,))),
    _one(
        "group norm → SiLU, channels last",
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
        lambda d: (d(*_images, last=True), d(128), d(128)),
    ),
    _one("instance norm → ReLU", lambda x: F.relu(F.instance_norm(x)), of((16, 64, 128, 128))),
    _one(
        "x · sigmoid(mean of pixels)", lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)), of((32, 256, 56, 56))
    ),
    _one("weights standardized", standardized, of((2048, 512, 3, 3))),
    *both("L2 normalization", lambda x: F.normalize(x, dim=-1), rows(1)),
    *both("L2 normalization of channels", lambda x: F.normalize(x, dim=1), of((16, 256, 32, 32))),
    *both("weight norm", lambda v, g: g * (v / v.norm(dim=-1, keepdim=True)), of((ROWS, COLUMNS), (ROWS, 1))),
    _one(
        "(x - mean) / deviation", lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5), rows(1)
    ),
    _one(
        "(x - least) / range",
        lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 1e-5),
        rows(1),
    ),
    # Softmax.
    _one("softmax of 197, with backward", lambda x: (x * 0.125).softmax(-1), of((64, 12, 197, 197)), True),
    *both("softmax of 49", lambda x: (x * 0.2).softmax(-1), of((1024, 12, 49, 49))),
    *both("softmax of 1,024", lambda x: x.softmax(-1), of(_scores)),
    *both("softmax along the second of three", lambda x: x.softmax(1), of((8, 512, 4096))),
    *both("softmax of the classes of pixels", lambda x: x.softmax(1), of((32, 19, 256, 256))),
    _one("scores + padding → softmax", lambda x, m: (x / 8 + m).softmax(-1), of((16, 12, 512, 512), (16, 1, 1, 512))),
    _one("scores, causal mask → softmax", causal, of(_scores)),
    _one("scores, ALiBi → softmax", alibi, of(_scores, (16,))),
    _one("capped logits → softmax", lambda x: F.softmax(30 * torch.tanh(x.float() / 30), -1), logits),
    _one("softmax, small ones dropped", min_p, logits),
    _one("softmax of 64 x 151,936", lambda x: (x.float() / 0.8).softmax(-1), of((64, 151936))),
    _one(
        "router: sigmoid over its sum",
        lambda x: x.sigmoid() / (x.sigmoid().sum(-1, keepdim=True) + 1e-20),
        of((16384, 256), dtype=FULL),
    ),
    *both("log-softmax of 50,257", lambda x: F.log_softmax(x, -1), of((ROWS, 50257))),
    _one("expectation under softmax", lambda x, v: (x.float().softmax(-1) * v).sum(-1), rows(1, 1)),
    # Losses.
    *both("log-probability of a token", token_log_probability, labelled),
    _one("logit less log-sum-exp", selected_logp, labelled),
    *both("entropy of softmax", entropy, logits),
    *both("Kullback-Leibler divergence", divergence, of(*[(ROWS, CLASSES)] * 2)),
    _one("Jensen-Shannon divergence", jensen_shannon, rows(2)),
    _one(
        "smoothed cross entropy, with backward",
        lambda x, n: F.cross_entropy(x.float(), n, label_smoothing=0.1),
        labelled,
        True,
    ),
    _one("cross entropy with z-loss, with backward", z_loss, labelled, True),
    *both("cosine similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), rows(2)),
    *both("squared distance of normalized rows", byol, rows(2)),
    *both("Pearson's correlation", pearson, rows(2)),
    *both("Dice loss", dice, rows(2)),
    *both("triplet loss", triplet, of(*[(ROWS, 1024)] * 3)),
    _one("smooth L1 loss", lambda x, y: F.smooth_l1_loss(x.float(), y.float(), reduction="none").mean(-1), rows(2)),
    _one(
        "binary cross entropy of logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x.float(), y.sigmoid().float(), reduction="none").mean(-1),
        rows(2),
    ),
    _one(
        "InfoNCE", lambda x: F.cross_entropy(x.float() / 0.07, torch.arange(len(x), device=x.device)), of((8192, 8192))
    ),
    # Quantization.
    _one("FP8, one scale", fp8_by_tensor, rows(1)),
    _one("SwiGLU → FP8 by row", halves(lambda a, b: fp8_by_row(F.silu(a) * b)), of((ROWS, 2 * COLUMNS))),
    _one("int8 by row", int8_by_row, rows(1)),
    _one("x / vector → int8 by row", lambda x, w: int8_by_row(x / w.abs().clamp(min=0.1)), rows(1, 1)),
    _one("RMSNorm → MX blocks", lambda x, w: mx(rms(x, w)), rows(1, 1)),
)
