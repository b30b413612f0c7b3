"""What commands print: tables and text for people, or one JSON value for programs."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="print one JSON value instead of text")]


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1))


def print_rows(rows: Iterable[Sequence[object]]) -> None:
    """Columns side by side, their texts whole: paths can be copied from a narrow terminal, too."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())


def write(file: Path, content: bytes, option: str) -> None:
    """Writes what `option` asks for. BadParameter if it cannot be written."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}", param_hint=option) from None
