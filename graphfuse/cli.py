"""The command line, ``graphfuse COMMAND``."""

import typer

from graphfuse.tuning.command import tune

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def graphfuse() -> None:
    """Op graphs in, one generated CUDA kernel out: measure and tune its kernels on this machine."""


app.command()(tune)
