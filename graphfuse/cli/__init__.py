"""The command line, ``graphfuse COMMAND``. Each command has a file.

Importing this loads neither torch nor CUDA, so ``--help`` is quick. Commands import what they need when they run.
"""

from typing import Annotated

import typer

from graphfuse.cli import cache, compile, doctor, exits, explain, info, measuring, new_plugin

app = typer.Typer(
    cls=exits.Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=exits.EPILOG,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        import graphfuse

        typer.echo(f"graphfuse {graphfuse.__version__}")
        raise typer.Exit


@app.callback()
def graphfuse(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Op graphs in, one generated CUDA kernel out: look at this installation, its plans, kernels and caches; measure
    and tune kernels on this machine."""


app.command()(info.info)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.command()(compile.compile)
app.command(cls=measuring.Bench)(measuring.bench)
app.command()(measuring.tune)
app.command()(new_plugin.new_plugin)
app.add_typer(cache.app)
