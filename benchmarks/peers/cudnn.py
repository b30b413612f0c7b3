"""The cuDNN frontend: its open-source engine, and what cuDNN itself has in heuristic mode A."""

import functools

from graphfuse.benchmarks.peer import Peer, Work


@functools.cache
def _handle():
    import cudnn

    return cudnn.create_handle()


def _why_not(case, arch: int) -> str | None:
    return "NVFP4 output is not measured with it (its scales lie in the workspace)" if case.output == "nvfp4" else None


def _rmsnorm_silu(mode: str, case, sets) -> Work:
    import cudnn
    import torch

    handle = _handle()
    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, handle=handle
    )
    types = {"bf16": cudnn.data_type.BFLOAT16, "fp8_e4m3": cudnn.data_type.FP8_E4M3}
    dim, row = [case.rows, case.columns, 1, 1], [case.columns, 1, 1, 1]
    x = graph.tensor(dim=dim, stride=row, data_type=cudnn.data_type.BFLOAT16)
    scale = graph.tensor(dim=[1, *dim[1:]], stride=row, data_type=cudnn.data_type.BFLOAT16)
    epsilon = graph.tensor(
        dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.FLOAT, is_pass_by_value=True
    )
    y = graph.rmsnorm(norm_forward_phase=cudnn.norm_forward_phase.INFERENCE, input=x, scale=scale, epsilon=epsilon)[0]
    y.set_dim(dim).set_stride(row).set_data_type(cudnn.data_type.BFLOAT16)
    z = graph.swish(input=y, swish_beta=1.0)
    z.set_output(True).set_data_type(types[case.output])
    graph.build([getattr(cudnn.heur_mode, mode)])

    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=sets[0].x.device)
    eps = torch.full((1, 1, 1, 1), sets[0].eps, dtype=torch.float32)

    def call(pack: dict) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(pack, workspace, handle=handle)

    def pack(s) -> dict:
        return {x: s.x.view(dim), scale: s.weight.view(1, *dim[1:]), epsilon: eps, z: s.out.view(dim)}

    return Work([functools.partial(call, pack(s)) for s in sets])


_VERSIONS = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13")

RMSNORM_SILU_OSS = Peer(
    "cudnn_oss",
    "cuDNN frontend, open-source engine",
    functools.partial(_rmsnorm_silu, "OPENSOURCE"),
    _VERSIONS,
    _why_not,
)
RMSNORM_SILU_A = Peer("cudnn_a", "cuDNN, mode A", functools.partial(_rmsnorm_silu, "A"), _VERSIONS, _why_not)
