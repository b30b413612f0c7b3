"""This project through its public graph API, with the first plan: tuned knobs where there are, else the heuristic's.

The graph is the case's, the tensors are those of the set's pack.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphfuse.benchmarks.peer import Peer, Work, in_place, through

DEPENDENT_LAUNCH, ONE_LAUNCH, INFERENCE_PHASE = "dependent launch", "one launch", "inference phase"
"""Ways that are compared among themselves."""


def work(graph, packs: Sequence[Mapping[str, object]], **options) -> Work:
    """One graph executed on each pack; options are those of execute."""
    import torch

    import graphfuse as gf

    graph.build([gf.heur_mode.FALLBACK if str(graph.handle.device) == "cpu" else gf.heur_mode.OPENSOURCE])
    why = dict.fromkeys(part.why for part in graph._plan(0).parts)
    device = next(iter(packs[0].values())).device
    # One for all calls, which run one after another.
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    calls = [functools.partial(graph.execute, pack, workspace, **options) for pack in packs]
    return Work(calls, graph.get_plan_name_at_index(0), ", ".join(why))


def handle(sets):
    import graphfuse as gf

    return gf.create_handle(str(sets[0].x.device))


def _plain(case, sets, **options) -> Work:
    return work(case.graph(handle(sets)), [s.pack() for s in sets], **options)


def _dependent(case, sets) -> Work:
    return _plain(case, sets, programmatic_dependent_launch=True)


def _one_launch(case, sets) -> Work:
    return work(case.joint_graph(handle(sets)), [s.joint_pack() for s in sets])


def _inference(case, sets) -> Work:
    mine = [replace(s, inverse_rms=None) for s in sets]
    made = work(case.inference_graph(handle(sets)), [s.pack() for s in mine])
    return replace(made, check=lambda: case.wrong(mine[0], tight=True))


def _in_a_model(dependent: bool, case, sets) -> Work:
    """As users call it in a model: the function that works in place."""
    from graphfuse.functional import fused_add_rmsnorm

    return through(sets, in_place(functools.partial(fused_add_rmsnorm, enable_pdl=dependent)))


def _why_not_dependent(case, arch: int) -> str | None:
    return None if arch >= 90 else f"dependent launch needs SM90, this is SM{arch}"


PEER = Peer("graphfuse", "graphfuse", _plain, ("graphfuse",), tight=True, keeps_builds=True)
DEPENDENT = Peer(
    "graphfuse_dependent",
    "graphfuse, dependent launch",
    _dependent,
    ("graphfuse",),
    _why_not_dependent,
    tight=True,
    own=True,
    way=DEPENDENT_LAUNCH,
)
ONE_KERNEL = Peer(
    "graphfuse_one_kernel",
    "graphfuse, one kernel",
    _one_launch,
    ("graphfuse",),
    tight=True,
    keeps_builds=True,
    own=True,
    way=ONE_LAUNCH,
)
INFERENCE = Peer(
    "graphfuse_inference",
    "graphfuse, inference phase",
    _inference,
    ("graphfuse",),
    tight=True,
    keeps_builds=True,
    own=True,
    way=INFERENCE_PHASE,
)
IN_A_MODEL = (
    Peer("graphfuse", "graphfuse", functools.partial(_in_a_model, False), ("graphfuse",)),
    Peer(
        DEPENDENT.name,
        DEPENDENT.title,
        functools.partial(_in_a_model, True),
        ("graphfuse",),
        _why_not_dependent,
        own=True,
        way=DEPENDENT_LAUNCH,
    ),
)
