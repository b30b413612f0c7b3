"""What the same norm costs the host with other libraries."""

from __future__ import annotations

from dataclasses import replace

from graphfuse.benchmarks.programs.host_calls import SILU, Call, Sets, backward


def compiled(sets: Sets) -> list[Call]:
    import torch

    shape = (sets.columns,)
    torch._dynamo.reset()

    @torch.compile(dynamic=False)
    def function(x, weight):
        return torch.nn.functional.rms_norm(x, shape, weight, sets.eps)

    return [Call("torch.compile of F.rms_norm", function, [(x, sets.weight) for x in sets.x])]


def flashinfer(sets: Sets) -> list[Call]:
    from flashinfer.norm import fused_rmsnorm_silu, rmsnorm

    given = [(x, sets.weight, sets.eps) for x in sets.x]
    return [
        Call("FlashInfer rmsnorm", rmsnorm, given),
        Call("FlashInfer fused_rmsnorm_silu", fused_rmsnorm_silu, given, makes=SILU),
    ]


def quack(sets: Sets) -> list[Call]:
    import torch
    from quack.rmsnorm import rmsnorm, rmsnorm_fwd

    weight = torch.nn.Parameter(sets.weight.clone())

    def forward(x):
        return rmsnorm_fwd(x, sets.weight, eps=sets.eps)

    def norm(x):
        return rmsnorm(x, weight, eps=sets.eps)

    return [Call("Quack rmsnorm_fwd", forward, sets.rows), backward("Quack rmsnorm", norm, weight, sets)]


def liger(sets: Sets) -> list[Call]:
    import torch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    weight = torch.nn.Parameter(sets.weight.clone())
    # As is its default, it writes dx over dy: into copies.
    mine = replace(sets, dy=[dy.clone() for dy in sets.dy])

    def norm(x):
        return LigerRMSNormFunction.apply(x, weight, sets.eps)

    name = "Liger RMSNorm"
    return [Call(name, norm, sets.rows), backward(name, norm, weight, mine)]


def cudnn(sets: Sets) -> list[Call]:
    import cudnn
    import torch

    kind = cudnn.data_type
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=kind.BFLOAT16, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT, handle=handle
    )
    dim = (*sets.x[0].shape, 1, 1)
    rows = [t.view(dim) for t in sets.x]
    results = [t.view(dim) for t in sets.out]
    scale = sets.weight.view(1, sets.columns, 1, 1)
    x, w = graph.tensor_like(rows[0]), graph.tensor_like(scale)
    eps = torch.full((1, 1, 1, 1), sets.eps)
    e = graph.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), is_pass_by_value=True, data_type=kind.FLOAT)
    y, _ = graph.rmsnorm(
        name="norm", norm_forward_phase=cudnn.norm_forward_phase.INFERENCE, input=x, scale=w, epsilon=e
    )
    y.set_output(True).set_data_type(kind.BFLOAT16)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=sets.device)

    def execute(pack):
        graph.execute(pack, space, handle=handle)

    packs = [({x: a, w: scale, e: eps, y: b},) for a, b in zip(rows, results, strict=True)]
    return [Call("cuDNN frontend execute", execute, packs)]


PEERS = {
    "torch.compile of F.rms_norm": compiled,
    "FlashInfer": flashinfer,
    "Quack": quack,
    "Liger": liger,
    "cuDNN frontend": cudnn,
}
"""What makes calls, by library."""
