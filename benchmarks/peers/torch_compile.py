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


def _rmsnorm_backward(case, sets) -> Work:
    compiled = _compiled(torch_eager.rmsnorm_backward)

    def gradients(s):
        return compiled(s.dy, s.x, s.weight, s.inverse_rms, s.residual)

    return returning(case, sets, ("dx", "dweight"), gradients)


def _in_a_model(case, sets) -> Work:
    return through(sets, _compiled(torch_eager.add_rmsnorm))


def _peer(make, why_not=lambda case, arch: None, where: str = "") -> Peer:
    return Peer("torch_compile", f"torch.compile{where}", make, ("torch", "triton"), why_not, keeps_builds=True)


RMSNORM_SILU = _peer(_rmsnorm_silu, torch_eager.why_not)
RMSNORM_CHANNELS = _peer(_rmsnorm_channels)
ADD_RMSNORM = _peer(_add_rmsnorm)
ADD_RMSNORM_FP8 = _peer(_add_rmsnorm_fp8)
QK_NORM = _peer(_qk_norm, where=", new tensors")
RMSNORM_BACKWARD = _peer(_rmsnorm_backward)
IN_A_MODEL = _peer(_in_a_model)
