"""Output of commands: text for people, or one JSON value for programs."""

import json
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="print one JSON value instead of text")]


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1))


def write(file: Path, content: bytes, option: str) -> None:
    """Writes the file that `option` names. Raises BadParameter if it cannot be written."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}", param_hint=option) from None
