"""A plain-text account of planning: what matched, who declined and why, what was chosen and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphfuse.ir import Subgraph
from graphfuse.match import Region
from graphfuse.plan import Plan, Verdict

if TYPE_CHECKING:
    from graphfuse.planner import Planner


def explain(planner: Planner) -> str:
    """The account, several lines; never raises for a graph that cannot be run."""
    lines = [
        f"graph {planner.graph.name!r} on {planner.device} ({planner.device.name}), {len(planner.graph.nodes)} nodes"
    ]
    lines += ["patterns"] + _patterns(planner)
    for proposal in planner.proposals:
        lines.append(f"engines, mode {proposal.mode.name}")
        lines += [f"  {_verdict(v)}" for v in proposal.verdicts] or ["  none is asked in this mode"]
        if proposal.uncovered:
            lines.append(f"  nothing takes {', '.join(proposal.uncovered)}")
    lines.append(f"plans ({len(planner.plans)})")
    lines += [f"  {_plan(planner, i, p)}" for i, p in enumerate(planner.plans)] or ["  none"]
    if planner.chosen is not None:
        lines += _chosen(planner, planner.at(planner.chosen))
    return "\n".join(lines)


def _patterns(planner: Planner) -> list[str]:
    lines = [f"  {r.pattern} matches {_nodes(r)}" for r in planner.regions]
    for d in planner.declined:
        fits = f"fits {_names(d.subgraph)}, but" if d.subgraph.nodes else "is not matched:"
        lines.append(f"  {d.pattern} {fits} {d.why}")
    lines += [f"  {line}" for line in planner.left_out]
    covered = {i for r in planner.regions for i in r.subgraph.node_ids}
    lines += [f"  nothing matches {node}" for i, node in enumerate(planner.graph.nodes) if i not in covered]
    return lines


def _nodes(region: Region) -> str:
    return _names(region.subgraph)


def _names(subgraph: Subgraph) -> str:
    return ", ".join(n.name if n.name.isprintable() else repr(n.name) for n in subgraph.nodes)


def _verdict(verdict: Verdict) -> str:
    answer = "can run" if verdict.why is None else "declines"
    reason = "" if verdict.why is None else f": {verdict.why}"
    return f"{verdict.engine} {answer} {_nodes(verdict.region)}{reason}"


def _plan(planner: Planner, index: int, p: Plan) -> str:
    reason = planner.barred(p)
    state = f"barred: {reason}" if reason else "selected" if index == planner.chosen else "available"
    return f"{index}: {p.name}, {p.workspace_bytes} bytes of workspace ({state})"


def _chosen(planner: Planner, p: Plan) -> list[str]:
    lines = ["chosen"]
    for part in p.parts:
        how = f"fused, pattern {part.region.pattern}" if part.region.pattern else "node by node"
        lines.append(f"  {part.name} runs {_nodes(part.region)} ({how})" + (f"; knobs: {part.why}" if part.why else ""))
    place = f"the {planner.chosen} before it are barred or were passed over" if planner.chosen else "it ranks first"
    rank = "rank goes by mode as given, then engine as registered, then tuned knobs before its own order of knobs"
    lines.append(f"  because {place}; {rank}")
    return lines + [f"  note: {note}" for note in p.notes]
