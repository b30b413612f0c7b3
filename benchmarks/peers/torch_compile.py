"""torch.compile, one graph for each shape, writing into the outputs that it is given but for QK-norm."""

import functools

from graphfuse.benchmarks.peer import Peer, Work, returning, through
from graphfuse.benchmarks.peers import torch_eager


def _compiled(function):
    import torch
    import torch._dynamo
    import torch._inductor.config

    # Shapes of earlier cases would count against the recompile limit of this code.
    torch._dynamo.reset()
    # One small kernel: a pool of compiler processes costs more than it saves.
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, dynamic=False, fullgraph=True)


def _rmsnorm_silu(case, sets) -> Work:
    from torch.nn.functional import rms_norm, silu

    def fused(x, weight, eps, out) -> None:
        out.copy_(silu(rms_norm(x, weight.shape, weight, eps)))

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, s.x, s.weight, s.eps, s.out) for s in sets])


def _rmsnorm_channels(case, sets) -> Work:
    def fused(x, weight, eps, out) -> None:
        out.copy_(torch_eager.rmsnorm_channels(x, weight, eps))

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, s.x, s.weight, s.eps, s.out) for s in sets])


def _add_rmsnorm(case, sets) -> Work:
    def fused(x, residual, weight, eps, out, total) -> None:
        y, added = torch_eager.add_rmsnorm(x, residual, weight, eps)
        out.copy_(y)
        total.copy_(added)

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, s.x, s.residual, s.weight, s.eps, s.out, s.sum) for s in sets])


def _add_rmsnorm_fp8(case, sets) -> Work:
    def fused(x, residual, weight, eps, scale, out, total) -> None:
        y, added = torch_eager.add_rmsnorm(x, residual, weight, eps)
        out.copy_(torch_eager.quantized(y, scale))
        total.copy_(added)

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, s.x, s.residual, s.weight, s.eps, s.scale, s.out, s.sum) for s in sets])


def _qk_norm(case, sets) -> Work:
    compiled = _compiled(torch_eager.qk_norm)
    return returning(case, sets, ("q_out", "k_out"), lambda s: compiled(s.q, s.k, s.q_weight, s.k_weight, s.eps))


def _qk_norm_rope(case, sets) -> Work:
    return torch_eager.rotated(case, sets, _compiled(torch_eager.qk_norm_rope))


def _qk_norm_rope_training(case, sets) -> Work:
    return torch_eager.rotated_and_back(case, sets, _compiled(torch_eager.qk_norm_rope))


def _qk_norm_rope_cache(case, sets) -> Work:
    return torch_eager.stored(case, sets, _compiled(torch_eager.qk_norm_rope_cache))


def _rmsnorm_backward(case, sets) -> Work:
    compiled = _compiled(torch_eager.rmsnorm_backward)

    def gradients(s):
        return compiled(s.dy, s.x, s.weight, s.inverse_rms, s.residual)

    return returning(case, sets, ("dx", "dweight"), gradients)


def _norm_add_norm(case, sets) -> Work:
    def fused(x, residual, before, after, eps, out, total) -> None:
        y, added = torch_eager.norm_add_norm(x, residual, before, after, eps)
        out.copy_(y)
        total.copy_(added)

    compiled = _compiled(fused)
    given = ((s.x, s.residual, s.before, s.after, s.eps, s.out, s.sum) for s in sets)
    return Work([functools.partial(compiled, *tensors) for tensors in given])


def _layernorm(case, sets) -> Work:
    from torch.nn.functional import layer_norm

    def fused(x, weight, bias, eps, y) -> None:
        y.copy_(layer_norm(x, weight.shape, weight, bias, eps))

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, s.x, s.weight, s.bias, s.eps, s.y) for s in sets])


def _layernorm_backward(case, sets) -> Work:
    compiled = _compiled(torch_eager.layernorm_backward)

    def gradients(s):
        return compiled(s.dy, s.x, s.weight, s.mean, s.inverse)

    return returning(case, sets, ("dx", "dweight", "dbias"), gradients)


def _softmax(case, sets) -> Work:
    compiled = _compiled(lambda x, y: y.copy_(x.softmax(1)))
    return Work([functools.partial(compiled, s.x, s.y) for s in sets])


def _cross_entropy(case, sets) -> Work:
    from torch.nn.functional import cross_entropy

    compiled = _compiled(lambda x, target, loss: loss.copy_(cross_entropy(x.float(), target, reduction="none")))
    return Work([functools.partial(compiled, s.x, s.target, s.loss) for s in sets])


def _silu_mul_fp8(case, sets) -> Work:
    def fused(x, out, scale) -> None:
        codes, scales = torch_eager.silu_mul_fp8(x)
        out.copy_(codes)
        scale.copy_(scales)

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, s.x, s.out, s.scale) for s in sets])


def _add_rmsnorm_blocks(case, sets) -> Work:
    def fused(x, residual, weight, eps, out, scales, total, normed) -> None:
        y, added = torch_eager.add_rmsnorm(x, residual, weight, eps)
        codes, by_row = torch_eager.quantized_in_blocks(y)
        for to, made in ((out, codes), (scales, by_row), (total, added), (normed, y)):
            if to is not None:
                to.copy_(made)

    compiled = _compiled(fused)
    given = ((s.x, s.residual, s.weight, s.eps, s.out, s.scales, s.sum, s.normed) for s in sets)
    return Work([functools.partial(compiled, *tensors) for tensors in given])


def _in_a_model(case, sets) -> Work:
    return through(sets, _compiled(torch_eager.add_rmsnorm))


def _peer(make, why_not=lambda case, arch: None, where: str = "") -> Peer:
    return Peer("torch_compile", f"torch.compile{where}", make, ("torch", "triton"), why_not, keeps_builds=True)


RMSNORM_SILU = _peer(_rmsnorm_silu, torch_eager.why_not)
RMSNORM_CHANNELS = _peer(_rmsnorm_channels)
ADD_RMSNORM = _peer(_add_rmsnorm)
ADD_RMSNORM_FP8 = _peer(_add_rmsnorm_fp8)
QK_NORM = _peer(_qk_norm, where=", new tensors")
QK_NORM_ROPE = _peer(_qk_norm_rope, where=", new tensors")
QK_NORM_ROPE_TRAINING = _peer(_qk_norm_rope_training, where=", new tensors")
QK_NORM_ROPE_CACHE = _peer(_qk_norm_rope_cache, where=", new queries")
RMSNORM_BACKWARD = _peer(_rmsnorm_backward)
NORM_ADD_NORM = _peer(_norm_add_norm)
LAYERNORM = _peer(_layernorm)
LAYERNORM_BACKWARD = _peer(_layernorm_backward)
SOFTMAX = _peer(_softmax)
CROSS_ENTROPY = _peer(_cross_entropy)
SILU_MUL_FP8 = _peer(_silu_mul_fp8)
ADD_RMSNORM_BLOCKS = _peer(_add_rmsnorm_blocks)
IN_A_MODEL = _peer(_in_a_model)
