"""torch.compile, one graph for each shape, writing into the output that it is given."""

import functools

from graphfuse.benchmarks.peer import Peer, Work
from graphfuse.benchmarks.peers.torch_eager import why_not


def _rmsnorm_silu(case, sets) -> Work:
    import torch
    import torch._dynamo
    import torch._inductor.config
    from torch.nn.functional import rms_norm, silu

    def fused(x, weight, eps, out) -> None:
        out.copy_(silu(rms_norm(x, weight.shape, weight, eps)))

    # Shapes of earlier cases would count against the recompile limit of this code.
    torch._dynamo.reset()
    # One small kernel: a pool of compiler processes costs more than it saves.
    torch._inductor.config.compile_threads = 1
    compiled = torch.compile(fused, dynamic=False, fullgraph=True)
    return Work([functools.partial(compiled, s.x, s.weight, s.eps, s.out) for s in sets])


RMSNORM_SILU = Peer("torch_compile", "torch.compile", _rmsnorm_silu, ("torch", "triton"), why_not, keeps_builds=True)
