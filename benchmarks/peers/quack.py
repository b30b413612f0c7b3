"""Quack's kernels, with their own choice of configuration; forward, they write into given tensors."""

import functools

from graphfuse.benchmarks.peer import Peer, Work, in_place, returning, through
from graphfuse.benchmarks.peers.graphfuse import ONE_LAUNCH


def _norm(s, x, weight, out, residual=None, total=None, inverse_rms=None) -> None:
    from quack.rmsnorm import _rmsnorm_fwd

    _rmsnorm_fwd(x, weight, out, None, inverse_rms, None, residual, total, s.eps)


def _add_rmsnorm(case, sets) -> Work:
    return Work([functools.partial(_norm, s, s.x, s.weight, s.out, s.residual, s.sum) for s in sets])


def _qk_norm(case, sets) -> Work:
    # With one weight for all heads it takes rows only, of a copy.
    (first, *_), heads = sets, (case.q_heads, case.k_heads)
    q_weight, k_weight = first.joint_weight.split(heads)

    def call(s) -> None:
        _norm(s, s.q, q_weight, s.q_out)
        _norm(s, s.k, k_weight, s.k_out)

    return Work([functools.partial(call, s) for s in sets])


def _qk_norm_one(case, sets) -> Work:
    return Work([functools.partial(_norm, s, s.joint, s.joint_weight, s.joint) for s in sets])


def _rmsnorm_training(case, sets) -> Work:
    return Work([functools.partial(_norm, s, s.x, s.weight, s.y, inverse_rms=s.inverse_rms) for s in sets])


def _rmsnorm_backward(case, sets) -> Work:
    from quack.rmsnorm import rmsnorm_bwd

    def gradients(s):
        return rmsnorm_bwd(s.x, s.weight, s.dy, s.inverse_rms, s.residual)[:2]

    return returning(case, sets, ("dx", "dweight"), gradients)


def _norm_add_norm(case, sets) -> Work:
    import torch

    between = torch.empty_like(sets[0].x)  # one for all calls, which run one after another

    def call(s) -> None:
        _norm(s, s.x, s.before, between)
        _norm(s, between, s.after, s.out, s.residual, s.sum)

    return Work([functools.partial(call, s) for s in sets])


def _layernorm(case, sets) -> Work:
    from quack.rmsnorm import _rmsnorm_fwd

    weight, bias = sets[0].weight.float(), sets[0].bias.float()  # it takes no others

    def call(s) -> None:
        _rmsnorm_fwd(s.x, weight, s.y, bias, None, None, None, None, s.eps, is_layernorm=True)

    return Work([functools.partial(call, s) for s in sets])


def _layernorm_backward(case, sets) -> Work:
    from quack.rmsnorm import layernorm_bwd

    weight = sets[0].weight.float()

    def gradients(s):
        return layernorm_bwd(s.x, weight, s.dy, s.inverse, s.mean)

    return returning(case, sets, ("dx", "dweight", "dbias"), gradients)


def _softmax(case, sets) -> Work:
    from quack.softmax import _softmax_fwd

    return Work([functools.partial(_softmax_fwd, s.x, s.y) for s in sets])


def _cross_entropy(case, sets) -> Work:
    from quack.cross_entropy import cross_entropy_fwd_out

    def call(s) -> None:
        cross_entropy_fwd_out(s.x, s.target, None, s.loss, None, None, None)

    return Work([functools.partial(call, s) for s in sets])


def _in_a_model(case, sets) -> Work:
    from quack.rmsnorm import _rmsnorm_fwd

    def norm(x, residual, weight, eps) -> None:
        # Threads read what they write before they write it, so it may be in place.
        _rmsnorm_fwd(x, weight, x, None, None, None, residual, residual, eps)

    return through(sets, in_place(norm))


_VERSIONS = ("quack-kernels", "nvidia-cutlass-dsl")

ADD_RMSNORM = Peer("quack", "Quack", _add_rmsnorm, _VERSIONS, keeps_builds=True)
RMSNORM_TRAINING = Peer("quack", "Quack", _rmsnorm_training, _VERSIONS, keeps_builds=True)
RMSNORM_BACKWARD = Peer("quack", "Quack", _rmsnorm_backward, _VERSIONS, keeps_builds=True)
QK_NORM = (
    Peer("quack", "Quack", _qk_norm, _VERSIONS, keeps_builds=True),
    Peer("quack_one_launch", "Quack, one launch", _qk_norm_one, _VERSIONS, way=ONE_LAUNCH),
)
NORM_ADD_NORM = Peer("quack", "Quack, two kernels", _norm_add_norm, _VERSIONS, keeps_builds=True)
LAYERNORM = Peer("quack", "Quack, float32 weights", _layernorm, _VERSIONS, keeps_builds=True)
LAYERNORM_BACKWARD = Peer("quack", "Quack, float32 weights", _layernorm_backward, _VERSIONS, keeps_builds=True)
SOFTMAX = Peer("quack", "Quack", _softmax, _VERSIONS, keeps_builds=True)
CROSS_ENTROPY = Peer("quack", "Quack", _cross_entropy, _VERSIONS, keeps_builds=True)
IN_A_MODEL = Peer("quack", "Quack", _in_a_model, _VERSIONS)
