"""This project through its public graph API, with the first plan: tuned knobs where there are, else the heuristic's."""

import functools

from graphfuse.benchmarks.peer import Peer, Work


def _rmsnorm_silu(case, sets, **options) -> Work:
    import graphfuse as gf

    device = sets[0].x.device
    graph = case.graph(gf.create_handle(str(device)))
    graph.build([gf.heur_mode.OPENSOURCE if device.type == "cuda" else gf.heur_mode.FALLBACK])

    (part,) = graph._plan(0).parts

    def pack(s) -> dict:
        named = {"x": s.x, "weight": s.weight, "out": s.out, "block_scale": s.scales}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    calls = [functools.partial(graph.execute, pack(s), **options) for s in sets]
    return Work(calls, graph.get_plan_name_at_index(0), part.why)


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
