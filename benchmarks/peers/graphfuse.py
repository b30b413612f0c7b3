"""This project through its public graph API, with the first plan: tuned knobs where there are, else the heuristic's."""

import functools

from graphfuse.benchmarks.peer import Peer, Work


def _rmsnorm_silu(case, sets, **options) -> Work:
    import graphfuse as gf

    data_type, device = gf.data_type, sets[0].x.device
    graph = gf.pygraph(intermediate_data_type=data_type.FLOAT, handle=gf.create_handle(str(device)))
    x = graph.tensor([case.rows, case.columns], data_type=data_type.BFLOAT16, name="x")
    weight = graph.tensor([1, case.columns], data_type=data_type.BFLOAT16, name="weight")
    y = graph.rmsnorm(x, weight, sets[0].eps, norm_forward_phase=gf.norm_forward_phase.INFERENCE)[0]
    z = graph.swish(y)
    if sets[0].scales is not None:
        z, scales = graph.block_scale_quantize(z, block_size=16)
        scales.set_output().set_name("scales")
    else:
        z.set_data_type({"bf16": data_type.BFLOAT16, "fp8_e4m3": data_type.FP8_E4M3}[case.output])
    z.set_output().set_name("out")
    graph.build([gf.heur_mode.OPENSOURCE if device.type == "cuda" else gf.heur_mode.FALLBACK])

    def pack(s) -> dict:
        named = {"x": s.x, "weight": s.weight, "out": s.out, "scales": s.scales}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    return Work([functools.partial(graph.execute, pack(s), **options) for s in sets], graph.get_plan_name_at_index(0))


def _dependent(case, sets) -> Work:
    return _rmsnorm_silu(case, sets, programmatic_dependent_launch=True)


RMSNORM_SILU = Peer("graphfuse", "graphfuse", _rmsnorm_silu, ("graphfuse",), tight=True, keeps_builds=True)
RMSNORM_SILU_DEPENDENT = Peer(
    "graphfuse_dependent",
    "graphfuse, dependent launch",
    _dependent,
    ("graphfuse",),
    lambda case, arch: None if arch >= 90 else f"dependent launch needs SM90, this is SM{arch}",
    tight=True,
    own=True,
)
