"""torch as users write it: one kernel an operation."""

import functools
from dataclasses import replace

from graphfuse.benchmarks.peer import Peer, Work, returning, through


def why_not(case, arch: int) -> str | None:
    return "torch converts nothing to FP4" if case.output == "nvfp4" else None


def _fused(x, weight, eps, out) -> None:
    import torch
    from torch.nn.functional import rms_norm, silu

    y = rms_norm(x, weight.shape, weight, eps)
    if out.dtype == y.dtype:
        torch.ops.aten.silu.out(y, out=out)
    else:
        out.copy_(silu(y, inplace=True))


def _rmsnorm_silu(case, sets) -> Work:
    return Work([functools.partial(_fused, s.x, s.weight, s.eps, s.out) for s in sets])


def rmsnorm_channels(x, weight, eps):
    """Over axis 1, worked out in float32."""
    from torch.nn.functional import silu

    values = x.float()
    return silu(values * (values.square().mean(1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def _rmsnorm_channels(case, sets) -> Work:
    return returning(case, sets, ("out",), lambda s: (rmsnorm_channels(s.x, s.weight, s.eps),))


RMSNORM_SILU = Peer("torch_eager", "torch eager", _rmsnorm_silu, ("torch",), why_not)


def add_rmsnorm(x, residual, weight, eps):
    """The normalized rows and the sum."""
    from torch.nn.functional import rms_norm

    total = x + residual
    return rms_norm(total, weight.shape, weight, eps), total


def quantized(y, scale):
    """FP8 E4M3 of y over the scale."""
    import torch

    return (y.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def qk_norm(q, k, q_weight, k_weight, eps):
    """Q and K as new tensors. In place they would be copied again, after torch.compile, too."""
    from torch.nn.functional import rms_norm

    return rms_norm(q, q_weight.shape, q_weight, eps), rms_norm(k, k_weight.shape, k_weight, eps)


def qk_norm_rope(q, k, q_weight, k_weight, table, positions, eps, interleaved):
    """As models have it: the norms, then pairs of columns in float32."""
    import torch

    cos, sin = table[positions].float()[:, None].chunk(2, dim=-1)
    made = []
    for y in qk_norm(q, k, q_weight, k_weight, eps):
        y = y.float()
        one, two = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, dim=-1)
        pairs = one * cos - two * sin, two * cos + one * sin
        y = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        made.append(y.to(q.dtype))
    return made


def rotated(case, sets, function) -> Work:
    """function: ``qk_norm_rope``, or what is compiled of it."""

    def call(s):
        return function(s.q, s.k, s.q_weight, s.k_weight, s.table, s.positions, s.eps, case.interleaved)

    return returning(case, sets, ("q_out", "k_out"), call)


def _qk_norm_rope(case, sets) -> Work:
    return rotated(case, sets, qk_norm_rope)


def rotated_and_back(case, sets, function) -> Work:
    """With the gradients, by autograd. function: as of `rotated`."""
    import torch

    leaves = ("q", "k", "q_weight", "k_weight")
    made = [replace(s, **{name: getattr(s, name).detach().requires_grad_() for name in leaves}) for s in sets]

    def call(s):
        given = [getattr(s, name) for name in leaves]
        with torch.enable_grad():
            results = function(*given, s.table, s.positions, s.eps, case.interleaved)
        return *(y.detach() for y in results), *torch.autograd.grad(results, given, (s.dq_out, s.dk_out))

    return returning(case, made, ("q_out", "k_out", *(f"d{name}" for name in leaves)), call)


def _qk_norm_rope_training(case, sets) -> Work:
    return rotated_and_back(case, sets, qk_norm_rope)


def qk_norm_rope_cache(q, k, v, q_weight, k_weight, table, positions, k_cache, v_cache, slots, scales, eps):
    """Q as a new tensor; K and V to their slots. scales: of K and V in FP8; None for caches of their type."""
    import torch

    made, k = qk_norm_rope(q, k, q_weight, k_weight, table, positions, eps, False)
    if scales is None:
        k_cache[slots], v_cache[slots] = k, v
    else:  # not every torch indexes FP8
        for cache, values, scale in zip((k_cache, v_cache), (k, v), scales, strict=True):
            cache.view(torch.uint8)[slots] = quantized(values, scale).view(torch.uint8)
    return made


def stored(case, sets, function) -> Work:
    """function: ``qk_norm_rope_cache``, or what is compiled of it."""

    def call(s):
        given = s.q, s.k, s.v, s.q_weight, s.k_weight, s.table, s.positions, s.k_cache, s.v_cache, s.slots
        return (function(*given, s.scales, s.eps),)

    return returning(case, sets, ("q_out",), call)


def _qk_norm_rope_cache(case, sets) -> Work:
    return stored(case, sets, qk_norm_rope_cache)


def _add_rmsnorm(case, sets) -> Work:
    return returning(case, sets, ("out", "sum"), lambda s: add_rmsnorm(s.x, s.residual, s.weight, s.eps))


def _add_rmsnorm_fp8(case, sets) -> Work:
    def norm(s):
        y, total = add_rmsnorm(s.x, s.residual, s.weight, s.eps)
        return quantized(y, s.scale), total

    return returning(case, sets, ("out", "sum"), norm)


def _qk_norm(case, sets) -> Work:
    return returning(case, sets, ("q_out", "k_out"), lambda s: qk_norm(s.q, s.k, s.q_weight, s.k_weight, s.eps))


def rmsnorm_backward(dy, x, weight, inverse_rms, residual):
    """Gradients of input and weight, worked out in float32. residual: what is added to the input's, or None."""
    normal, scaled = x.float() * inverse_rms[:, None], dy.float() * weight.float()
    dx = inverse_rms[:, None] * (scaled - normal * (scaled * normal).mean(1, keepdim=True))
    if residual is not None:
        dx = dx + residual.float()
    return dx.to(x.dtype), (dy.float() * normal).sum(0).to(weight.dtype)


def _rmsnorm_backward(case, sets) -> Work:
    import torch

    def gradients(s):
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            s.dy, s.x, s.weight.shape, s.inverse_rms[:, None], s.weight, [True, True]
        )
        return (dx if s.residual is None else dx + s.residual), dweight

    return returning(case, sets, ("dx", "dweight"), gradients)


def norm_add_norm(x, residual, before, after, eps):
    """The normalized rows and the sum."""
    from torch.nn.functional import rms_norm

    total = rms_norm(x, before.shape, before, eps) + residual
    return rms_norm(total, after.shape, after, eps), total


def _norm_add_norm(case, sets) -> Work:
    def norms(s):
        return norm_add_norm(s.x, s.residual, s.before, s.after, s.eps)

    return returning(case, sets, ("out", "sum"), norms)


def _layernorm(case, sets) -> Work:
    from torch.nn.functional import layer_norm

    return returning(case, sets, ("y",), lambda s: (layer_norm(s.x, s.weight.shape, s.weight, s.bias, s.eps),))


def layernorm_backward(dy, x, weight, mean, inverse):
    """Gradients of input, weight and bias, worked out in float32."""
    dy = dy.float()
    normal, scaled = (x.float() - mean[:, None]) * inverse[:, None], dy * weight.float()
    along = normal * (scaled * normal).mean(1, keepdim=True)
    dx = inverse[:, None] * (scaled - scaled.mean(1, keepdim=True) - along)
    return dx.to(x.dtype), (dy * normal).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


def _layernorm_backward(case, sets) -> Work:
    import torch

    def gradients(s):
        kept = s.mean[:, None], s.inverse[:, None]
        return torch.ops.aten.native_layer_norm_backward(
            s.dy, s.x, s.weight.shape, *kept, s.weight, s.bias, [True, True, True]
        )

    return returning(case, sets, ("dx", "dweight", "dbias"), gradients)


def _softmax(case, sets) -> Work:
    import torch

    return Work([functools.partial(torch.softmax, s.x, 1, out=s.y) for s in sets])


def _cross_entropy(case, sets) -> Work:
    from torch.nn.functional import cross_entropy

    return returning(case, sets, ("loss",), lambda s: (cross_entropy(s.x, s.target, reduction="none"),))


def silu_mul_fp8(x):
    """FP8 E4M3 of SiLU of the first half of each row times the second half, and the scale of each row."""
    import torch
    from torch.nn.functional import silu

    a, b = x.chunk(2, 1)
    y = (silu(a) * b).float()
    scale = (y.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (y / scale).to(torch.float8_e4m3fn), scale


def quantized_in_blocks(y):
    """FP8 E4M3 of y, and the scale of each 128 neighbours of a row."""
    import torch

    blocks = y.float().unflatten(1, (-1, 128))
    scales = (blocks.abs().amax(2) / 448).clamp(min=2**-126)
    return (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def _silu_mul_fp8(case, sets) -> Work:
    return returning(case, sets, ("out", "scale"), lambda s: silu_mul_fp8(s.x))


def _add_rmsnorm_blocks(case, sets) -> Work:
    def norm(s):
        y, total = add_rmsnorm(s.x, s.residual, s.weight, s.eps)
        codes, scales = quantized_in_blocks(y)
        return codes, scales, total, y if case.both else None

    return returning(case, sets, ("out", "scales", "sum", "normed"), norm)


RMSNORM_CHANNELS = Peer("torch_eager", "torch eager, new tensors", _rmsnorm_channels, ("torch",))
ADD_RMSNORM = Peer("torch_eager", "torch eager", _add_rmsnorm, ("torch",))
ADD_RMSNORM_FP8 = Peer("torch_eager", "torch eager", _add_rmsnorm_fp8, ("torch",))
QK_NORM = Peer("torch_eager", "torch eager, new tensors", _qk_norm, ("torch",))
QK_NORM_ROPE = Peer("torch_eager", "torch eager, new tensors", _qk_norm_rope, ("torch",))
QK_NORM_ROPE_TRAINING = Peer("torch_eager", "torch eager, new tensors", _qk_norm_rope_training, ("torch",))
QK_NORM_ROPE_CACHE = Peer("torch_eager", "torch eager, new queries", _qk_norm_rope_cache, ("torch",))
RMSNORM_BACKWARD = Peer("torch_eager", "torch eager", _rmsnorm_backward, ("torch",))
NORM_ADD_NORM = Peer("torch_eager", "torch eager", _norm_add_norm, ("torch",))
LAYERNORM = Peer("torch_eager", "torch eager", _layernorm, ("torch",))
LAYERNORM_BACKWARD = Peer("torch_eager", "torch eager", _layernorm_backward, ("torch",))
SOFTMAX = Peer("torch_eager", "torch eager", _softmax, ("torch",))
CROSS_ENTROPY = Peer("torch_eager", "torch eager, loss in bf16", _cross_entropy, ("torch",))
SILU_MUL_FP8 = Peer("torch_eager", "torch eager", _silu_mul_fp8, ("torch",))
ADD_RMSNORM_BLOCKS = Peer("torch_eager", "torch eager", _add_rmsnorm_blocks, ("torch",))
IN_A_MODEL = Peer("torch_eager", "torch eager", lambda case, sets: through(sets, add_rmsnorm), ("torch",))
