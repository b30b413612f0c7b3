"""FlashInfer's fused kernels.

Its norms are in CuTe DSL where that is installed, and in CUDA; they start by dependent launch unless told not to.
"""

import functools

from graphfuse.benchmarks.peer import Peer, Work, in_place, overwriting, returning, through
from graphfuse.benchmarks.peers.graphfuse import DEPENDENT_LAUNCH


def _why_not(case, arch: int) -> str | None:
    if case.output == "nvfp4" and arch < 100:
        return f"NVFP4 output needs SM100, this is SM{arch}"
    return None


def _rmsnorm_silu(case, sets) -> Work:
    import torch
    from flashinfer.norm import fused_rmsnorm_silu

    def call(s):
        if s.block_scale is None:
            return functools.partial(fused_rmsnorm_silu, s.x, s.weight, s.eps, out=s.out)
        out = s.out.view(torch.float4_e2m1fn_x2)
        return functools.partial(fused_rmsnorm_silu, s.x, s.weight, s.eps, out=out, block_scale=s.block_scale)

    return Work([call(s) for s in sets])


def _add_rmsnorm(dependent: bool, case, sets) -> Work:
    from flashinfer.norm import fused_add_rmsnorm

    def norm(s) -> None:
        fused_add_rmsnorm(s.out, s.sum, s.weight, s.eps, enable_pdl=dependent)

    return overwriting(case, sets, norm, out="x", sum="residual")


def _add_rmsnorm_cuda(case, sets) -> Work:
    from flashinfer.norm import get_norm_module

    def norm(s) -> None:
        get_norm_module().fused_add_rmsnorm(s.out, s.sum, s.weight, s.eps, False)

    return overwriting(case, sets, norm, out="x", sum="residual")


def _add_rmsnorm_fp8(dependent: bool, case, sets) -> Work:
    from flashinfer.norm import fused_add_rmsnorm_quant

    def norm(s) -> None:
        fused_add_rmsnorm_quant(s.out, s.x, s.sum, s.weight, s.scale, s.eps, enable_pdl=dependent)

    return overwriting(case, sets, norm, sum="residual")


def _add_rmsnorm_fp8_cuda(case, sets) -> Work:
    from flashinfer.norm import get_norm_module

    def norm(s) -> None:
        get_norm_module().fused_add_rmsnorm_quant(s.out, s.x, s.sum, s.weight, s.scale, s.eps, False)

    return overwriting(case, sets, norm, sum="residual")


def _add_rmsnorm_blocks(dependent: bool, case, sets) -> Work:
    import torch
    from flashinfer.norm import fused_add_rmsnorm_fp8_block_quant

    # It always writes the normalized rows: where the case has none, into one buffer for all calls.
    normed = None if case.both else torch.empty_like(sets[0].x)

    def norm(s) -> None:
        given = s.x, s.sum, s.weight, s.eps
        beside = s.normed if case.both else normed
        fused_add_rmsnorm_fp8_block_quant(s.out, s.by_block, beside, *given, enable_pdl=dependent)

    return overwriting(case, sets, norm, sum="residual")


def _layernorm(case, sets) -> Work:
    from flashinfer.norm import layernorm

    weight, bias = sets[0].weight.float(), sets[0].bias.float()  # it takes no others
    return returning(case, sets, ("y",), lambda s: (layernorm(s.x, weight, bias, s.eps),))


def _qk_norm(dependent: bool, case, sets) -> Work:
    from flashinfer.norm import rmsnorm

    def norm(s) -> None:
        rmsnorm(s.q, s.q_weight, s.eps, out=s.q_out, enable_pdl=dependent)
        rmsnorm(s.k, s.k_weight, s.eps, out=s.k_out, enable_pdl=dependent)

    return Work([functools.partial(norm, s) for s in sets])


def _in_a_model(dependent: bool, case, sets) -> Work:
    from flashinfer.norm import fused_add_rmsnorm

    return through(sets, in_place(functools.partial(fused_add_rmsnorm, enable_pdl=dependent)))


_VERSIONS = ("flashinfer-python", "apache-tvm-ffi")
_CUTE = (*_VERSIONS, "nvidia-cutlass-dsl")


def _norms(make, where: str = "") -> tuple[Peer, Peer]:
    """As it is usually compared, and with dependent launch."""
    return (
        Peer("flashinfer", f"FlashInfer{where}", functools.partial(make, False), _CUTE),
        Peer(
            "flashinfer_dependent",
            f"FlashInfer{where}, dependent launch",
            functools.partial(make, True),
            _CUTE,
            way=DEPENDENT_LAUNCH,
        ),
    )


RMSNORM_SILU = Peer("flashinfer", "FlashInfer", _rmsnorm_silu, _VERSIONS, _why_not, keeps_builds=True)
ADD_RMSNORM = (
    *_norms(_add_rmsnorm, ", in place"),
    Peer("flashinfer_cuda", "FlashInfer's CUDA norm, in place", _add_rmsnorm_cuda, _VERSIONS),
)
ADD_RMSNORM_FP8 = (
    *_norms(_add_rmsnorm_fp8, ", sum in place"),
    Peer("flashinfer_cuda", "FlashInfer's CUDA norm, sum in place", _add_rmsnorm_fp8_cuda, _VERSIONS),
)
ADD_RMSNORM_BLOCKS = _norms(_add_rmsnorm_blocks, ", sum in place, normalized rows beside")
LAYERNORM = Peer("flashinfer", "FlashInfer, float32 weights", _layernorm, _CUTE)
QK_NORM = _norms(_qk_norm)
IN_A_MODEL = _norms(_in_a_model)
