"""``graphfuse explain``: how a graph is planned, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli import exits, output
from graphfuse.cli.output import Json
from graphfuse.cli.subject import Cases, Subject, graphs, planner

MODES = ("A", "B", "OPENSOURCE", "FALLBACK")
FORMATS = ("text", "tree", "mermaid", "dot", "svg")


def explain(
    subject: Subject,
    case: Cases = (),
    mode: Annotated[str, typer.Option(help=f"the heuristic mode: {', '.join(MODES)}")] = "A",
    arch: Annotated[
        str | None, typer.Option(help="plan for a chip that need not be there, as sm_90a; default: the current device")
    ] = None,
    form: Annotated[str, typer.Option("--format", help=f"how to say it: {', '.join(FORMATS)}")] = "text",
    html: Annotated[
        Path | None, typer.Option(help="write an HTML page to this file instead, of one case", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which patterns matched a graph, which engines declined and why, and which plans are left, best first.

    Of a bench without --case, the first case. Nothing is compiled. Exits with 1 if there is no plan.
    """
    from graphfuse import explain as explaining
    from graphfuse.base.device import for_arch
    from graphfuse.base.enums import heur_mode
    from graphfuse.base.errors import GraphNotSupportedError

    for option, value, accepted in (("--mode", mode, MODES), ("--format", form, FORMATS)):
        if value not in accepted:
            raise typer.BadParameter(f"{value!r}; accepted: {', '.join(accepted)}", param_hint=option)
    if html is not None and len(case) > 1:
        raise typer.BadParameter("a page is of one case", param_hint="--html")
    device = None if arch is None else for_arch(arch)
    found = graphs(subject, case, quick=False)
    accounts, unsupported = [], False
    for name, graph in list(found.items())[: None if case else 1]:
        planning = planner(graph, device)
        try:
            planning.create([heur_mode[mode]])
        except GraphNotSupportedError:  # the account has every engine's reason
            unsupported = True
        account = explaining.explained(planning)
        if html is not None:
            output.write(html, explaining.html(account).encode(), "--html")
        if as_json:
            accounts.append({"subject": name, **json.loads(explaining.json(account))})
        elif html is not None:
            typer.echo(f"{name}: {html}")
        elif form == "text":
            typer.echo(f"{name}\n{explaining.text(account)}")
        else:
            typer.echo(explaining.FORMATS[form](account))
    if as_json:
        output.print_json(accounts)
    if unsupported:
        raise typer.Exit(exits.FAULT)
