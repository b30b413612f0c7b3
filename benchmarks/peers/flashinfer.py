"""FlashInfer's fused kernels."""

import functools

from graphfuse.benchmarks.peer import Peer, Work


def _why_not(case, arch: int) -> str | None:
    if case.output == "nvfp4" and arch < 100:
        return f"NVFP4 output needs SM100, this is SM{arch}"
    return None


def _rmsnorm_silu(case, sets) -> Work:
    import torch
    from flashinfer.norm import fused_rmsnorm_silu

    def call(s):
        if s.scales is None:
            return functools.partial(fused_rmsnorm_silu, s.x, s.weight, s.eps, out=s.out)
        out = s.out.view(torch.float4_e2m1fn_x2)
        return functools.partial(fused_rmsnorm_silu, s.x, s.weight, s.eps, out=out, block_scale=s.scales)

    return Work([call(s) for s in sets])


RMSNORM_SILU = Peer(
    "flashinfer", "FlashInfer", _rmsnorm_silu, ("flashinfer-python", "apache-tvm-ffi"), _why_not, keeps_builds=True
)
