"""The command line, ``graphfuse COMMAND``."""

from pathlib import Path
from typing import Annotated

import typer

from graphfuse.tuning.command import tune

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def graphfuse() -> None:
    """Op graphs in, one generated CUDA kernel out: measure and tune its kernels on this machine."""


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="which bench")] = "rmsnorm-silu",
    output: Annotated[list[str], typer.Option(help="only this output type (repeatable)")] = (),
    rows: Annotated[list[int], typer.Option(help="only this number of rows (repeatable)")] = (),
    columns: Annotated[list[int], typer.Option(help="only this number of columns (repeatable)")] = (),
    peers: Annotated[list[str], typer.Option(help="only this peer, beside ours and the limit (repeatable)")] = (),
    quick: Annotated[bool, typer.Option("--quick", help="a few of the cases")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="write NAME-DEVICE.json into FOLDER, NAME-part-DEVICE.json until it has all"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep what the record there already has")] = False,
    listing: Annotated[bool, typer.Option("--list", help="print peers and cases, measure nothing")] = False,
) -> None:
    """Time the kernels beside their peers, in one process and run, on the GPU."""
    from graphfuse.benchmarks import command
    from graphfuse.benchmarks.benches import BENCHES
    from graphfuse.record import no_gpu

    if name not in BENCHES:
        raise typer.BadParameter(f"{name!r} is no bench; there are: {', '.join(BENCHES)}")
    chosen = command.Choice(tuple(output), tuple(rows), tuple(columns), tuple(peers), quick)
    if wrong := chosen.unknown(BENCHES[name]):
        raise typer.BadParameter(wrong)
    if resume and record is None:
        raise typer.BadParameter("there is no record to go on with; give --record FOLDER, too", param_hint="--resume")
    if record is not None and record.exists() and not record.is_dir():
        raise typer.BadParameter(f"{record} is no folder", param_hint="--record")
    if listing:
        typer.echo(command.listing(BENCHES[name], chosen))
        return
    if reason := no_gpu():
        typer.echo(f"needs a CUDA device: {reason.removeprefix('no CUDA device: ')}", err=True)
        raise typer.Exit(2)
    try:
        command.run(BENCHES[name], chosen, record, resume)
    except command.ResumeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


app.command()(tune)
