"""``graphfuse bench`` and ``graphfuse tune``, which need a GPU."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from graphfuse.cli import exits
from graphfuse.cli.output import Json, print_json
from graphfuse.cli.subject import find_bench

DEFAULT = "rmsnorm-silu"
"""The bench that is measured or tuned by default."""


class Bench(TyperCommand):
    """The command whose first argument may be a program. The rest is then the program's own command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from graphfuse.benchmarks.command import PROGRAMS

        if args and args[0] in PROGRAMS:
            _program(PROGRAMS[args[0]], args[0]).main(args[1:], f"{ctx.command_path} {args[0]}", exits.NO_DEVICE)
            raise typer.Exit
        return super().parse_args(ctx, args)


def _program(module: str, name: str) -> ModuleType:
    """A module of the repository. Without a clone the command ends with an error."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):
            raise
        typer.echo(
            f"graphfuse bench {name} needs a clone of the repository, installed from it by pip install -e .; "
            "an installed package does not have it",
            err=True,
        )
        raise typer.Exit(exits.USAGE) from None


def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            help="which bench; in a clone also models, followers, wan-vae, with own options: bench models --help",
            show_default=DEFAULT,
        ),
    ] = None,
    output: Annotated[list[str], typer.Option(help="only this output type (repeatable)")] = (),
    rows: Annotated[list[int], typer.Option(help="only this number of rows (repeatable)")] = (),
    columns: Annotated[list[int], typer.Option(help="only this number of columns (repeatable)")] = (),
    peers: Annotated[list[str], typer.Option(help="only this peer, with ours and the limit (repeatable)")] = (),
    quick: Annotated[bool, typer.Option("--quick", help="a few of the cases")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="write NAME-DEVICE.json into FOLDER, NAME-part-DEVICE.json until it has all"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep what the record there already has")] = False,
    listing: Annotated[
        bool,
        typer.Option("--list", help="print the bench's peers and cases, or without one all benches; measure nothing"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time the kernels beside their peers, in one process and run, on the GPU."""
    from graphfuse.benchmarks import command

    if name is None and listing:
        _list_benches(bool(output or rows or columns or peers or quick or record or resume), as_json)
        return
    name = name or DEFAULT
    if name in command.PROGRAMS:
        raise typer.BadParameter(f"{name} has options of its own and comes first: graphfuse bench {name} ...")
    found = find_bench(name, command.PROGRAMS)
    chosen = command.Choice(tuple(output), tuple(rows), tuple(columns), tuple(peers), quick)
    if wrong := chosen.unknown(found):
        raise typer.BadParameter(wrong)
    if resume and record is None:
        raise typer.BadParameter("there is no record to go on with; give --record FOLDER, too", param_hint="--resume")
    if record is not None and record.exists() and not record.is_dir():
        raise typer.BadParameter(f"{record} is no folder", param_hint="--record")
    if listing and as_json:
        print_json(command.described_choice(found, chosen))
    elif listing:
        typer.echo(command.listing(found, chosen))
    if listing:
        return
    exits.need_gpu("graphfuse bench")
    try:
        results = command.run(found, chosen, record, resume, progress_on_stderr=as_json)
    except command.ResumeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exits.USAGE) from error
    if as_json:
        print_json(results.record)


def _list_benches(more: bool, as_json: bool) -> None:
    """Prints all benches, one per line. more: whether other options select something of a bench."""
    from graphfuse.benchmarks import command
    from graphfuse.benchmarks.benches import BENCHES

    if more:
        raise typer.BadParameter(
            "alone it lists the benches; to list some cases of one, name it: graphfuse bench BENCH --list ...",
            param_hint="--list",
        )
    if as_json:
        print_json({"benches": command.described_benches(BENCHES.values()), "programs": list(command.PROGRAMS)})
    else:
        typer.echo(command.benches_listed(BENCHES.values(), command.PROGRAMS))


def tune(
    name: Annotated[str, typer.Argument(help="the bench whose problems are tuned for")] = DEFAULT,
    rows: Annotated[list[int], typer.Option(help="only this number of rows (repeatable)")] = (),
    columns: Annotated[list[int], typer.Option(help="only this number of columns (repeatable)")] = (),
    output: Annotated[list[str], typer.Option(help="only this output type (repeatable)")] = (),
    quick: Annotated[bool, typer.Option("--quick", help="a few of the problems")] = False,
    time_budget: Annotated[float, typer.Option(help="seconds after which it stops; run it again to go on")] = 600.0,
    again: Annotated[bool, typer.Option("--again", help="also what is tuned already")] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write an engine's own table instead of the user's store")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time the knobs of many problems on the GPU and keep the fastest: kernels planned from then on use them.

    Finished problems are skipped, so it can be stopped and run again. Of rmsnorm-silu, rows and columns may be any.
    """
    from graphfuse.benchmarks import rmsnorm_silu, tuning
    from graphfuse.benchmarks.command import Choice

    found = find_bench(name)
    if found is rmsnorm_silu.BENCH:
        wanted = tuning.rmsnorm_silu(rows, columns, output, quick)
    else:
        choice = Choice(tuple(output), tuple(rows), tuple(columns), (), quick)
        if wrong := choice.unknown(found):
            raise typer.BadParameter(wrong)
        wanted = choice.cases(found)
    if not time_budget > 0:
        raise typer.BadParameter(f"{time_budget}; accepted: seconds above 0", param_hint="--time-budget")
    if table is not None and (table.is_dir() or not table.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{table}; accepted: a file in a folder that exists", param_hint="--table")
    exits.need_gpu("graphfuse tune")
    left = tuning.run(wanted, table, time_budget, again, progress_on_stderr=as_json)
    if as_json:
        print_json({"bench": found.name, "problems": len(wanted), "left": [str(one) for one in left]})
    if left:
        typer.echo(f"out of time: {len(left)} of {len(wanted)} problems are left; run it again to go on", err=True)
