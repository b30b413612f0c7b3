"""``graph.autotune``: tunes the kernels of a graph on its own tensors, stores the winners and selects them."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphNotSupportedError, GraphTypeError
from graphfuse.contract.engine import Engine, ProblemClass, knobs_from_dict, knobs_to_dict
from graphfuse.planning import plan
from graphfuse.planning.plan import Part, Plan
from graphfuse.planning.planner import Planner
from graphfuse.runtime import buffers, record
from graphfuse.tuned_tables import store
from graphfuse.tuned_tables.entry import Source, Timed, TunedEntry
from graphfuse.tuned_tables.tunings import arch, origin_text
from graphfuse.tuning.report import BEST, PartReport, Trial, TuningReport
from graphfuse.tuning.search import search
from graphfuse.tuning.workbench import Workbench, reference, tunable


def autotune(
    planner: Planner,
    variant_pack: Mapping,
    workspace: object,
    handle,
    time_budget: float,
    file: Path | None = None,
    origin: str = "user",
) -> TuningReport:
    """Tune each kernel of the selected plan (or the first allowed one), with the other kernels unchanged.

    Reads the tensors of the variant pack and writes none. The winners are stored in `file` (default: the user's for
    this device), and the plan with them is built and selected. time_budget: seconds; candidates that are not timed by
    then are not tried. Raises GraphNotSupportedError if there is nothing to time: no CUDA device, or no kernel with
    knobs.
    """
    began = time.monotonic()
    if isinstance(time_budget, bool) or not isinstance(time_budget, int | float) or not time_budget > 0:
        raise GraphTypeError(f"autotune: time_budget must be a number of seconds above 0, got {time_budget!r}")
    base, device = _base(planner), planner.device
    if handle is not None:
        planner.stream_of(handle)  # raises an error for one of another device, or destroyed
    bound = planner.binder(base).bind(variant_pack, workspace)
    given = None if workspace is None else buffers.describe(workspace).nbytes
    limit = base.workspace_bytes if given is None else given  # another plan may use as much
    import torch

    made = source(device, origin)
    parts, tuned = list(base.parts), []
    needs = [part.outline.workspace_bytes for part in parts]
    places = [place for place, part in enumerate(parts) if tunable(part)]
    with torch.cuda.device(device.ordinal):
        torch.cuda.synchronize()
        memory = reference(base, device, bound)
        for left, place in zip(range(len(places), 0, -1), places, strict=True):
            part = parts[place]
            found = next((t for t in tuned if t.fits(part)), None)
            allowed = functools.partial(_allowed, planner, tuple(parts), tuple(needs), place, limit)
            if found is None:
                knobs = [k for k in candidates(part.engine, part.facts, device, part.knobs) if allowed(k)]
                now = time.monotonic()
                deadline = now + (began + time_budget - now) / left
                found = _Tuned(
                    part, search(Workbench(part, device, memory, bound.scalars), knobs, deadline, most=limit)
                )
                tuned.append(found)
            parts[place], needs[place] = found.applied(part, made, allowed)
    entries = [t.entry(made) for t in tuned if t.sure]
    file = file or store.user_file(device)
    kept = bool(entries) and store.add(file, entries)
    planner.adopt(plan.assemble(planner.graph, parts, device, needs))
    return TuningReport(device.name, tuple(t.report for t in tuned), time.monotonic() - began, file if kept else None)


@dataclass(frozen=True)
class _Tuned:
    """Result of a search for one part, which holds for all parts of its problem class."""

    part: Part
    trials: tuple[Trial, ...]

    @property
    def problem(self) -> ProblemClass:
        return self.part.engine.problem(self.part.facts)

    @property
    def sure(self) -> bool:
        """True if the time sufficed to determine the best."""
        return bool(self.trials) and self.trials[0].status == BEST

    @property
    def timed(self) -> bool:
        return bool(self.trials) and self.trials[0].time is not None

    @property
    def best(self) -> Mapping[str, object]:
        return self.trials[0].knobs if self.timed else knobs_to_dict(self.part.knobs)

    @property
    def report(self) -> PartReport:
        nodes = tuple(node.name for node in self.part.region.subgraph.nodes)
        return PartReport(nodes, self.part.engine.name, self.problem.rows, self.trials, self.best)

    def fits(self, other: Part) -> bool:
        return other.engine is self.part.engine and other.engine.problem(other.facts) == self.problem

    def entry(self, made: Source) -> TunedEntry:
        return entry_of(self.part.engine, self.problem, self.trials, made)

    def applied(self, part: Part, made: Source, allowed: Callable[[object, int], bool]) -> tuple[Part, int]:
        """The part with the fastest knobs that are `allowed` at its place, or unchanged if none are; and its
        workspace."""
        for rank, trial in enumerate(t for t in self.trials if t.time):
            knobs = knobs_from_dict(part.engine, dict(trial.knobs))
            if allowed(knobs, trial.scratch):
                return Part(part.region, part.engine, knobs, self._why(rank, made)), trial.scratch
        return part, part.outline.workspace_bytes

    def _why(self, rank: int, made: Source) -> str:
        if rank:
            return "the fastest of those timed that the workspace has room for"
        return origin_text(self.entry(made)) if self.sure else "the fastest of those timed, which were not all"


def _allowed(
    planner: Planner,
    parts: tuple[Part, ...],
    needs: tuple[int, ...],
    place: int,
    limit: int,
    knobs: object,
    scratch: int | None = None,
) -> bool:
    """True if the part at `place` may have these knobs while the others stay unchanged. A workspace that fits into
    `limit` bytes at one place, with the tensors that live there, may not fit at another. needs: bytes of each part's
    own workspace. scratch: of this part with these knobs; None for the size known before it is prepared."""
    changed = Part(parts[place].region, parts[place].engine, knobs)
    own = changed.outline.workspace_bytes if scratch is None else scratch
    p = plan.assemble(
        planner.graph,
        [*parts[:place], changed, *parts[place + 1 :]],
        planner.device,
        [*needs[:place], own, *needs[place + 1 :]],
    )
    return p.workspace_bytes <= limit and planner.barred(p) is None


def candidates(engine: Engine, facts: object, device: Device, first: object = None) -> list[object]:
    """The knobs to try: `first`, then all that the engine proposes in mode B."""
    wide = engine.propose(facts, device, heur_mode.B)
    return list(dict.fromkeys(([] if first is None else [first]) + list(wide)))


def source(device: Device, origin: str) -> Source:
    """Origin of entries made here and now."""
    about = _environment(record.CHECKOUT)
    versions = {"graphfuse": record.version("graphfuse"), "nvrtc": about["nvrtc"], "cuda": about["cuda"]}
    return Source(origin, device.name, arch(device), str(about["date"]), about["driver"], versions, about["commit"])


_environment = functools.cache(record.environment)


def entry_of(engine: Engine, problem: ProblemClass, trials: tuple[Trial, ...], source: Source) -> TunedEntry:
    """Entry that is stored for a search: the winner and, for the user, the other timed knobs. A table that comes with
    the engine has the winner alone."""
    best, *others = (t for t in trials if t.time)
    timed = tuple(Timed(t.knobs, round(t.time.median, 3)) for t in others if source.origin == "user")
    entry = TunedEntry(source, engine.name, problem.key, problem.rows, best.knobs, round(best.time.median, 3))
    return replace(entry, others=timed)


def _base(planner: Planner) -> Plan:
    planner.check_support()
    index = planner.chosen
    if index is None:
        index = next(i for i, p in enumerate(planner.plans) if planner.barred(p) is None)
    base, device = planner.plans[index], planner.device
    if device.kind != "cuda" or not device.here:
        raise GraphNotSupportedError(
            f"graph {planner.graph.name!r} is planned for {device.described}, where nothing is timed; "
            "accepted by autotune: a CUDA device"
        )
    if not any(map(tunable, base.parts)):
        names = ", ".join(p.engine.name for p in base.parts)
        raise GraphNotSupportedError(
            f"graph {planner.graph.name!r}: plan {base.name} (engines {names}) has no kernel with knobs and work to do"
        )
    return base
