"""``graphfuse explain``: what planning makes of a graph, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.cli import exits, output
from graphfuse.cli.output import Json
from graphfuse.cli.subject import Cases, Subject, graphs, plan_for

if TYPE_CHECKING:
    from graphfuse.match import Declined, Region
    from graphfuse.planner import Planner

MODES = ("A", "B", "OPENSOURCE", "FALLBACK")


def explain(
    subject: Subject,
    case: Cases = (),
    mode: Annotated[str, typer.Option(help=f"the heuristic mode: {', '.join(MODES)}")] = "A",
    arch: Annotated[
        str | None, typer.Option(help="plan for a chip that need not be there, as sm_90a; default: the current device")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which patterns matched a graph, which engines declined and why, and which plans are left, best first.

    Of a bench without --case, the first case. Nothing is compiled. Exits with 1 if there is no plan.
    """
    from graphfuse.device import for_arch
    from graphfuse.enums import heur_mode
    from graphfuse.errors import GraphNotSupportedError
    from graphfuse.planner import Planner

    if mode not in MODES:
        raise typer.BadParameter(f"{mode!r}; accepted: {', '.join(MODES)}", param_hint="--mode")
    device = None if arch is None else for_arch(arch)
    found = graphs(subject, case, quick=False)
    accounts, unsupported = [], False
    for name, graph in list(found.items())[: None if case else 1]:
        if device is not None:
            plan_for(graph, device)
        graph.validate()
        planner = Planner(graph.frozen, graph.handle, (), ())
        try:
            planner.create([heur_mode[mode]])
        except GraphNotSupportedError:  # the account has every engine's reason
            unsupported = True
        if as_json:
            accounts.append({"subject": name, **account(planner)})
        else:
            from graphfuse import explain as explaining

            typer.echo(f"{name}\n{explaining.explain(planner)}")
    if as_json:
        output.print_json(accounts)
    if unsupported:
        raise typer.Exit(exits.FAULT)


def account(planner: Planner) -> dict[str, object]:
    """What `explain` says, as JSON values."""
    from graphfuse.engine import knobs_to_dict

    def nodes(region: Region | Declined) -> list[str]:
        return [node.name for node in region.subgraph.nodes]

    return {
        "graph": planner.graph.name,
        "device": {"name": planner.device.name, "kind": planner.device.kind, "arch": planner.device.arch},
        "nodes": [node.name for node in planner.graph.nodes],
        "matches": [{"pattern": region.pattern, "nodes": nodes(region)} for region in planner.regions],
        "unmatched": [{"pattern": d.pattern, "nodes": nodes(d), "why": str(d.why)} for d in planner.declined],
        "engines": [
            {
                "mode": proposal.mode.name,
                "engine": verdict.engine,
                "nodes": nodes(verdict.region),
                "declines": None if verdict.why is None else str(verdict.why),
            }
            for proposal in planner.proposals
            for verdict in proposal.verdicts
        ],
        "plans": [
            {
                "name": plan.name,
                "workspace_bytes": plan.workspace_bytes,
                "parts": [
                    {
                        "engine": p.engine.name,
                        "pattern": p.region.pattern,
                        "nodes": nodes(p.region),
                        "knobs": knobs_to_dict(p.knobs),
                        "why": p.why,
                    }
                    for p in plan.parts
                ],
                "notes": list(plan.notes),
            }
            for plan in planner.plans
        ],
    }
