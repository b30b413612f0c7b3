"""torch as users write it: one kernel an operation. Most peers are formulas, which `torch_compile` has, too."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphfuse.benchmarks.peer import Peer, Work, changed, returning, through


@dataclass(frozen=True)
class Formula:
    """What a case computes, by torch. function: of `given`, fields of a buffer set or of its case; returns a tensor, or
    one for each of `makes`, fields of the set."""

    function: Callable[..., object]
    given: tuple[str, ...]
    makes: tuple[str, ...]

    def of(self, case, s) -> list[object]:
        """What the function is given."""
        return [getattr(s if hasattr(s, name) else case, name) for name in self.given]

    def results(self, *given) -> Sequence[object]:
        """One tensor for each of `makes`."""
        made = self.function(*given)
        return made if isinstance(made, tuple | list) else (made,)

    def returned(self, case, sets, compiled: Callable[[Callable], Callable] = lambda function: function) -> Work:
        """New tensors. compiled: makes what is called of the function."""
        run = compiled(self.results)
        return returning(case, sets, self.makes, lambda s: run(*self.of(case, s)))


def formula(given: str, makes: str) -> Callable[[Callable[..., object]], Formula]:
    """Decorator of a function that a formula is made of. given, makes: the fields, with spaces between them."""
    return lambda function: Formula(function, tuple(given.split()), tuple(makes.split()))


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


def add_rmsnorm(x, residual, weight, eps):
    """The normalized rows and the sum."""
    from torch.nn.functional import rms_norm

    total = x + residual
    return rms_norm(total, weight.shape, weight, eps), total


def quantized(y, scale):
    """FP8 E4M3 of y over the scale."""
    import torch

    return (y.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


@formula("x residual weight eps scale", "out sum")
def add_rmsnorm_fp8(x, residual, weight, eps, scale):
    y, total = add_rmsnorm(x, residual, weight, eps)
    return quantized(y, scale), total


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


def rotated_and_back(case, sets, function: Callable = qk_norm_rope) -> Work:
    """With the gradients, by autograd. function: ``qk_norm_rope``, or what is compiled of it."""
    import torch

    leaves = ("q", "k", "q_weight", "k_weight")
    made = [changed(s, **{name: getattr(s, name).detach().requires_grad_() for name in leaves}) for s in sets]

    def call(s):
        given = [getattr(s, name) for name in leaves]
        with torch.enable_grad():
            results = function(*given, s.table, s.positions, s.eps, case.interleaved)
        return *(y.detach() for y in results), *torch.autograd.grad(results, given, (s.dq_out, s.dk_out))

    return returning(case, made, ("q_out", "k_out", *(f"d{name}" for name in leaves)), call)


@formula("q k v q_weight k_weight table positions k_cache v_cache slots scales eps", "q_out")
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


def rmsnorm_backward(dy, x, weight, inverse_rms, residual):
    """Gradients of input and weight, worked out in float32. residual: what is added to the input's, or None."""
    normal, scaled = x.float() * inverse_rms[:, None], dy.float() * weight.float()
    dx = inverse_rms[:, None] * (scaled - normal * (scaled * normal).mean(1, keepdim=True))
    if residual is not None:
        dx = dx + residual.float()
    return dx.to(x.dtype), (dy.float() * normal).sum(0).to(weight.dtype)


@formula("dy x weight inverse_rms residual", "dx dweight")
def _rmsnorm_backward(dy, x, weight, inverse_rms, residual):
    import torch

    kept = inverse_rms[:, None], weight, [True, True]
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, x, weight.shape, *kept)
    return (dx if residual is None else dx + residual), dweight


@formula("x residual before after eps", "out sum")
def norm_add_norm(x, residual, before, after, eps):
    """The normalized rows and the sum."""
    from torch.nn.functional import rms_norm

    total = rms_norm(x, before.shape, before, eps) + residual
    return rms_norm(total, after.shape, after, eps), total


@formula("x weight bias eps", "y")
def layernorm(x, weight, bias, eps):
    from torch.nn.functional import layer_norm

    return layer_norm(x, weight.shape, weight, bias, eps)


def layernorm_backward(dy, x, weight, mean, inverse):
    """Gradients of input, weight and bias, worked out in float32."""
    dy = dy.float()
    normal, scaled = (x.float() - mean[:, None]) * inverse[:, None], dy * weight.float()
    along = normal * (scaled * normal).mean(1, keepdim=True)
    dx = inverse[:, None] * (scaled - scaled.mean(1, keepdim=True) - along)
    return dx.to(x.dtype), (dy * normal).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


@formula("dy x weight mean inverse bias", "dx dweight dbias")
def _layernorm_backward(dy, x, weight, mean, inverse, bias):
    import torch

    kept = mean[:, None], inverse[:, None], weight, bias, [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(dy, x, weight.shape, *kept)


def _softmax(case, sets) -> Work:
    import torch

    return Work([functools.partial(torch.softmax, s.x, 1, out=s.y) for s in sets])


@formula("x target", "loss")
def _cross_entropy(x, target):
    from torch.nn.functional import cross_entropy

    return cross_entropy(x, target, reduction="none")


@formula("x", "out scale")
def silu_mul_fp8(x):
    """FP8 E4M3 of SiLU of the first half of each row times the second half, and the scale of each row."""
    import torch
    from torch.nn.functional import silu

    a, b = x.chunk(2, 1)
    y = (silu(a) * b).float()
    scale = (y.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (y / scale).to(torch.float8_e4m3fn), scale


@formula("x residual weight eps", "out scales sum normed")
def add_rmsnorm_blocks(x, residual, weight, eps):
    """FP8 E4M3 of normalized rows, the scale of each 128 neighbours of a row, the sum, and the normalized rows."""
    import torch

    y, total = add_rmsnorm(x, residual, weight, eps)
    blocks = y.float().unflatten(1, (-1, 128))
    scales = (blocks.abs().amax(2) / 448).clamp(min=2**-126)
    return (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales, total, y


def _peer(make: Callable[..., Work] | Formula, where: str = "", why_not=lambda case, arch: None) -> Peer:
    make = make.returned if isinstance(make, Formula) else make
    return Peer("torch_eager", f"torch eager{where}", make, ("torch",), why_not)


CHANNELS = formula("x weight eps", "out")(rmsnorm_channels)
SUM_AND_NORM = formula("x residual weight eps", "out sum")(add_rmsnorm)
HEADS = formula("q k q_weight k_weight eps", "q_out k_out")(qk_norm)
ROTATED = formula("q k q_weight k_weight table positions eps interleaved", "q_out k_out")(qk_norm_rope)

RMSNORM_SILU = _peer(_rmsnorm_silu, why_not=why_not)
RMSNORM_CHANNELS = _peer(CHANNELS, ", new tensors")
ADD_RMSNORM = _peer(SUM_AND_NORM)
ADD_RMSNORM_FP8 = _peer(add_rmsnorm_fp8)
QK_NORM = _peer(HEADS, ", new tensors")
QK_NORM_ROPE = _peer(ROTATED, ", new tensors")
QK_NORM_ROPE_TRAINING = _peer(rotated_and_back, ", new tensors")
QK_NORM_ROPE_CACHE = _peer(qk_norm_rope_cache, ", new queries")
RMSNORM_BACKWARD = _peer(_rmsnorm_backward)
NORM_ADD_NORM = _peer(norm_add_norm)
LAYERNORM = _peer(layernorm)
LAYERNORM_BACKWARD = _peer(_layernorm_backward)
SOFTMAX = _peer(_softmax)
CROSS_ENTROPY = _peer(_cross_entropy, ", loss in bf16")
SILU_MUL_FP8 = _peer(silu_mul_fp8)
ADD_RMSNORM_BLOCKS = _peer(add_rmsnorm_blocks)
IN_A_MODEL = _peer(lambda case, sets: through(sets, add_rmsnorm))
