"""Choice among the plans of a library by their times, as the libraries' own benchmark modes choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from graphfuse.base.errors import HomeNotFoundError
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.planning.planner import UNPREPARED, Planner
from graphfuse.runtime import timing
from graphfuse.tuned_tables import store
from graphfuse.tuned_tables.tunings import HEURISTIC
from graphfuse.tuning.autotune import entry_of, source
from graphfuse.tuning.report import TIMED, Trial

if TYPE_CHECKING:
    import torch


def build_fastest(
    planner: Planner,
    engine: str,
    variant_pack: Mapping[str, torch.Tensor],
    measure: Callable[[Callable[[], None]], timing.Time] = timing.measure_uncaptured,
) -> bool:
    """Build and select the fastest plan of the engine, and store its knobs with the user's tuned ones. False, without a
    selected plan, if the engine has no plan that can be built.

    planner: of a graph that one engine runs whole, with its plans created. The plans are timed on the tensors of the
    variant pack, whose outputs they overwrite with the same result; nothing is compared with the reference engine. A
    plan whose knobs are tuned already is built at once. measure: how a call is timed. Raises the errors of ``execute``,
    and torch.OutOfMemoryError.
    """
    import torch

    times: dict[int, timing.Time] = {}
    for index, plan in enumerate(planner.plans):
        part, *others = plan.parts
        if others or part.engine.name != engine:
            continue
        try:
            planner.build_at(index)
        except UNPREPARED:
            continue
        if part.why != HEURISTIC:
            return True
        device = next(iter(variant_pack.values())).device
        space = torch.empty(planner.at(index).workspace_bytes, dtype=torch.uint8, device=device)
        call = planner.bind(planner.executable(index), variant_pack, space, None, False)
        times[index] = measure(call)
    if not times:
        return False
    ranked = sorted(times, key=lambda index: times[index].median)
    planner.build_at(ranked[0])
    part = planner.at(ranked[0]).parts[0]
    problem = part.engine.problem(part.facts)
    if problem is not None:
        knobs = (knobs_to_dict(planner.at(index).parts[0].knobs) for index in ranked)
        trials = tuple(Trial(k, TIMED, times[index]) for k, index in zip(knobs, ranked, strict=True))
        made = entry_of(part.engine, problem, trials, source(planner.device, "user"))
        with contextlib.suppress(HomeNotFoundError):  # without a home folder there is no user's file
            store.add(store.user_file(planner.device), [made])
    return True
