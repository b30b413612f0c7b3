"""Exit codes. An error of graphfuse becomes one line on standard error and one of these codes."""

from typing import Any

import typer
from typer.core import TyperGroup

from graphfuse.base.errors import DeviceError, GraphfuseError, SettingError

FAULT = 1
USAGE = 2
NO_DEVICE = 3

EPILOG = (
    "Exit codes: 0 all is well; 1 a fault was found, or something failed; 2 wrong arguments or settings; "
    "3 the command needs a device that is not there."
)

_CODES = ((DeviceError, NO_DEVICE), (SettingError, USAGE), (GraphfuseError, FAULT))


class Group(TyperGroup):
    """Commands that print errors of graphfuse in one line. Any other exception is a bug and keeps its traceback.
    Without a command the help is printed, with the exit code of wrong arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            typer.echo(ctx.get_help())
            raise typer.Exit(USAGE)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraphfuseError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(next(code for kind, code in _CODES if isinstance(error, kind))) from error


def need_gpu(command: str) -> None:
    """Ends the command with NO_DEVICE if nothing can run on a GPU."""
    from graphfuse.runtime.record import gpu_needed

    if reason := gpu_needed(command):
        typer.echo(reason, err=True)
        raise typer.Exit(NO_DEVICE)
