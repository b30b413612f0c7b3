"""torch as users write it: one kernel an operation."""

import functools

from graphfuse.benchmarks.peer import Peer, Work


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


RMSNORM_SILU = Peer("torch_eager", "torch eager", _rmsnorm_silu, ("torch",), why_not)
