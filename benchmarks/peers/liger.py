"""Liger's Triton kernels, which make their outputs themselves and keep the inverse RMS."""

from graphfuse.benchmarks.peer import Peer, Work, returning


def _add_rmsnorm(case, sets) -> Work:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    def norm(s):
        return fused_add_rms_norm_forward(s.x, s.residual, s.weight, s.eps, 0.0, "llama")[:2]

    return returning(case, sets, ("out", "sum"), norm)


ADD_RMSNORM = Peer("liger", "Liger", _add_rmsnorm, ("liger-kernel", "triton"), keeps_builds=True)
