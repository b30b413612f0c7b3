"""This project through its public graph API, with the first plan: tuned knobs where there are, else the heuristic's.

The graph is the case's, the tensors are those of the set's pack.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphfuse.benchmarks.peer import Peer, Work, changed, in_place, overwriting, through

DEPENDENT_LAUNCH, ONE_LAUNCH, INFERENCE_PHASE = "dependent launch", "one launch", "inference phase"
TWO_KERNELS = "two kernels"
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
    return work(case.joint_graph(handle(sets)), [case.joint_pack(s) for s in sets])


def _inference(case, sets) -> Work:
    mine = [changed(s, inverse_rms=None) for s in sets]
    made = work(case.inference_graph(handle(sets)), [s.pack() for s in mine])
    return replace(made, check=lambda: case.wrong(mine[0], tight=True))


def _norm_add_then_norm(case, sets) -> Work:
    on = handle(sets)
    first = work(case.first_graph(on), [s.pack("x", "before", "residual", "sum") for s in sets])
    second = work(case.second_graph(on), [s.pack("sum", "after", "out") for s in sets])

    def both(make_sum, normalize) -> None:
        make_sum()
        normalize()

    calls = [functools.partial(both, *pair) for pair in zip(first.calls, second.calls, strict=True)]
    return Work(calls, f"{first.note}; {second.note}", f"{first.knobs_from}; {second.knobs_from}")


def _norm_then_add_norm(case, sets) -> Work:
    """The functions, the sum in place."""
    import torch

    from graphfuse.functional import fused_add_rmsnorm, rmsnorm

    between = torch.empty_like(sets[0].x)  # one for all calls, which run one after another

    def norms(s) -> None:
        rmsnorm(s.x, s.before, s.eps, out=between, enable_pdl=False)
        fused_add_rmsnorm(between, s.sum, s.after, s.eps, enable_pdl=False, out=s.out)

    return overwriting(case, sets, norms, sum="residual")


def _in_a_model(dependent: bool, case, sets) -> Work:
    """As users call it in a model: the function that works in place."""
    from graphfuse.functional import fused_add_rmsnorm

    return through(sets, in_place(functools.partial(fused_add_rmsnorm, enable_pdl=dependent)))


def _why_not_dependent(case, arch: int) -> str | None:
    return None if arch >= 90 else f"dependent launch needs SM90, this is SM{arch}"


_ours = functools.partial(Peer, distributions=("graphfuse",))
_way = functools.partial(_ours, own=True)

PEER = _ours("graphfuse", "graphfuse", _plain, tight=True, keeps_builds=True)
DEPENDENT = _way(
    "graphfuse_dependent",
    "graphfuse, dependent launch",
    _dependent,
    why_not=_why_not_dependent,
    tight=True,
    way=DEPENDENT_LAUNCH,
)
ONE_KERNEL = _way(
    "graphfuse_one_kernel", "graphfuse, one kernel", _one_launch, tight=True, keeps_builds=True, way=ONE_LAUNCH
)
INFERENCE = _way(
    "graphfuse_inference", "graphfuse, inference phase", _inference, tight=True, keeps_builds=True, way=INFERENCE_PHASE
)
NORM_ADD_THEN_NORM = _way(
    "graphfuse_norm_add_then_norm",
    "graphfuse, norm and add, then norm",
    _norm_add_then_norm,
    tight=True,
    keeps_builds=True,
    way=TWO_KERNELS,
)
NORM_THEN_ADD_NORM = _way(
    "graphfuse_norm_then_add_norm",
    "graphfuse, norm, then add and norm",
    _norm_then_add_norm,
    keeps_builds=True,
    way=TWO_KERNELS,
)
IN_A_MODEL = (
    _ours("graphfuse", "graphfuse", functools.partial(_in_a_model, False)),
    replace(DEPENDENT, make=functools.partial(_in_a_model, True), tight=False),
)
