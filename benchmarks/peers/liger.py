"""Liger's Triton kernels, which make their outputs themselves and keep what the backward needs of each row."""

import functools

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


def _cross_entropy(case, sets) -> Work:
    """Its kernel alone: the function around it asks the GPU for the number of rows that count."""
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    width = min(MAX_FUSED_SIZE, 1 << (case.columns - 1).bit_length())
    options = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "none"}
    options |= {"softcap": None, "HAS_WEIGHT": False, "HAS_SOFTCAPPING": False, "HAS_GRADIENTS": False}
    options |= {"RETURN_Z_LOSS": False, "RETURN_TOKEN_ACCURACY": False, "RETURN_PREDICTED_TOKENS": False}
    unused = {"weight_ptr": None, "z_loss_ptr": None, "token_accuracy_ptr": None, "predicted_tokens_ptr": None}
    unused |= {"token_accuracy_stride": 0, "predicted_tokens_stride": 0, "weight_sum": 0.0}
    unused |= {"n_non_ignore": case.rows, "sum_non_ignore_weight": case.rows}  # of means

    def call(s) -> None:
        liger_cross_entropy_kernel[(case.rows,)](
            X_ptr=s.x,
            X_stride=s.x.stride(0),
            Y_ptr=s.target,
            Y_stride=1,
            loss_ptr=s.loss,
            loss_stride=1,
            n_cols=case.columns,
            BLOCK_SIZE=width,
            num_warps=32,
            **options,
            **unused,
        )

    return Work([functools.partial(call, s) for s in sets])


ADD_RMSNORM = Peer("liger", "Liger", _add_rmsnorm, ("liger-kernel", "triton"), keeps_builds=True)
RMSNORM_BACKWARD = Peer("liger", "Liger, in place", _rmsnorm_backward, ("liger-kernel", "triton"), keeps_builds=True)
LAYERNORM = Peer("liger", "Liger", _layernorm, ("liger-kernel", "triton"), keeps_builds=True)
LAYERNORM_BACKWARD = Peer("liger", "Liger", _layernorm_backward, ("liger-kernel", "triton"), keeps_builds=True)
CROSS_ENTROPY = Peer("liger", "Liger", _cross_entropy, ("liger-kernel", "triton"), keeps_builds=True)
IN_A_MODEL = Peer("liger", "Liger", _in_a_model, ("liger-kernel", "triton"))
