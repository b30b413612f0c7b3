"""Liger's Triton kernels, which make their outputs themselves and keep what the backward needs of each row."""

from graphfuse.benchmarks.peer import Peer, Work, overwriting, returning, through


def _add_rmsnorm(case, sets) -> Work:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    def norm(s):
        return fused_add_rms_norm_forward(s.x, s.residual, s.weight, s.eps, 0.0, "llama")[:2]

    return returning(case, sets, ("out", "sum"), norm)


def _in_a_model(case, sets) -> Work:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    def norm(x, residual, weight, eps):
        return fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")[:2]

    return through(sets, norm)


def _rmsnorm_backward(case, sets) -> Work:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    norm, settings = (0.0, 0), calculate_settings(case.columns)  # offset of the weight; casts as in Llama
    stages = 2  # as its forward says

    def call(s) -> None:
        # In place, as is its default: dx takes the place of dy.
        given = (s.x, s.weight, s.inverse_rms, *norm, *settings)
        if s.residual is None:
            *_, s.dweight = rms_norm_backward(s.dx, *given, True, None)
        else:
            *_, s.dweight = fused_add_rms_norm_backward(s.dx, s.residual, *given, stages, True)

    return overwriting(case, sets, call, dx="dy")


def _layernorm(case, sets) -> Work:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return returning(case, sets, ("y",), lambda s: layer_norm_forward(s.x, s.weight, s.bias, s.eps)[:1])


def _layernorm_backward(case, sets) -> Work:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    def gradients(s):
        return layer_norm_backward(s.dy, s.x, s.weight, s.bias, s.mean, s.inverse)

    return returning(case, sets, ("dx", "dweight", "dbias"), gradients)


ADD_RMSNORM = Peer("liger", "Liger", _add_rmsnorm, ("liger-kernel", "triton"), keeps_builds=True)
RMSNORM_BACKWARD = Peer("liger", "Liger, in place", _rmsnorm_backward, ("liger-kernel", "triton"), keeps_builds=True)
LAYERNORM = Peer("liger", "Liger", _layernorm, ("liger-kernel", "triton"), keeps_builds=True)
LAYERNORM_BACKWARD = Peer("liger", "Liger", _layernorm_backward, ("liger-kernel", "triton"), keeps_builds=True)
IN_A_MODEL = Peer("liger", "Liger", _in_a_model, ("liger-kernel", "triton"))
