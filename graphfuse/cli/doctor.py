"""``graphfuse doctor``: checks this installation, and prints the command that repairs each fault."""

import dataclasses

import typer

from graphfuse.base.wording import counted
from graphfuse.cli import exits, output
from graphfuse.cli.faults import FAULT, NOTE, OK, findings
from graphfuse.cli.output import Json

_COLOURS = {OK: "green", NOTE: "yellow", FAULT: "red"}


def doctor(as_json: Json = False) -> None:
    """Look for faults of this installation, and print with each the command that mends it.

    Exits with 1 if there is one.
    """
    found = list(findings())
    faults = [finding for finding in found if finding.level == FAULT]
    if as_json:
        output.print_json([dataclasses.asdict(finding) for finding in found])
    else:
        for finding in found:
            level = typer.style(f"{finding.level:5}", fg=_COLOURS[finding.level])
            typer.echo(f"{level}  {finding.check}: {finding.what}")
            if finding.mend:
                typer.echo(f"       to mend it: {finding.mend}")
        typer.echo(counted(len(faults), "fault"))
    if faults:
        raise typer.Exit(exits.FAULT)
