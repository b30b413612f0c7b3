"""torch.compile, one graph for each shape, writing into the outputs that it is given but for QK-norm."""

import functools
from collections.abc import Callable

from graphfuse.benchmarks.peer import Peer, Work, through
from graphfuse.benchmarks.peers import torch_eager
from graphfuse.benchmarks.peers.torch_eager import Formula, formula


def _compiled(function: Callable) -> Callable:
    import torch
    import torch._dynamo
    import torch._inductor.config

    # Shapes of earlier cases would count against the recompile limit of this code.
    torch._dynamo.reset()
    # One small kernel: a pool of compiler processes costs more than it saves.
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, dynamic=False, fullgraph=True)


def _written(made: Formula, case, sets) -> Work:
    """Into the outputs of the set; None is one that the case does not have."""

    def fused(given, outputs) -> None:
        for to, result in zip(outputs, made.results(*given), strict=True):
            if to is not None:
                to.copy_(result)

    compiled = _compiled(fused)
    return Work([functools.partial(compiled, made.of(case, s), [getattr(s, n) for n in made.makes]) for s in sets])


@formula("x weight eps", "out")
def _rmsnorm_silu(x, weight, eps):
    from torch.nn.functional import rms_norm, silu

    return silu(rms_norm(x, weight.shape, weight, eps))


@formula("x", "y")
def _softmax(x):
    return x.softmax(1)


@formula("x target", "loss")
def _cross_entropy(x, target):
    from torch.nn.functional import cross_entropy

    return cross_entropy(x.float(), target, reduction="none")


_RMSNORM_BACKWARD = formula("dy x weight inverse_rms residual", "dx dweight")(torch_eager.rmsnorm_backward)
_LAYERNORM_BACKWARD = formula("dy x weight mean inverse", "dx dweight dbias")(torch_eager.layernorm_backward)


def _peer(make, why_not=lambda case, arch: None, where: str = "") -> Peer:
    return Peer("torch_compile", f"torch.compile{where}", make, ("torch", "triton"), why_not, keeps_builds=True)


def _writing(made: Formula, why_not=lambda case, arch: None) -> Peer:
    return _peer(functools.partial(_written, made), why_not)


def _returning(made: Formula, where: str = "") -> Peer:
    return _peer(functools.partial(made.returned, compiled=_compiled), where=where)


RMSNORM_SILU = _writing(_rmsnorm_silu, torch_eager.why_not)
RMSNORM_CHANNELS = _writing(torch_eager.CHANNELS)
ADD_RMSNORM = _writing(torch_eager.SUM_AND_NORM)
ADD_RMSNORM_FP8 = _writing(torch_eager.add_rmsnorm_fp8)
QK_NORM = _returning(torch_eager.HEADS, ", new tensors")
QK_NORM_ROPE = _returning(torch_eager.ROTATED, ", new tensors")
QK_NORM_ROPE_TRAINING = _peer(
    lambda case, sets: torch_eager.rotated_and_back(case, sets, _compiled(torch_eager.qk_norm_rope)),
    where=", new tensors",
)
QK_NORM_ROPE_CACHE = _returning(torch_eager.qk_norm_rope_cache, ", new queries")
RMSNORM_BACKWARD = _returning(_RMSNORM_BACKWARD)
NORM_ADD_NORM = _writing(torch_eager.norm_add_norm)
LAYERNORM = _writing(torch_eager.layernorm)
LAYERNORM_BACKWARD = _returning(_LAYERNORM_BACKWARD)
SOFTMAX = _writing(_softmax)
CROSS_ENTROPY = _writing(_cross_entropy)
SILU_MUL_FP8 = _writing(torch_eager.silu_mul_fp8)
ADD_RMSNORM_BLOCKS = _writing(torch_eager.add_rmsnorm_blocks)
IN_A_MODEL = _peer(lambda case, sets: through(sets, _compiled(torch_eager.add_rmsnorm)))
