"""``graphfuse cache``: lists, checks and removes compiled kernels and tuned knobs."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from graphfuse.base.wording import counted, in_columns
from graphfuse.cli import exits, output
from graphfuse.cli.cache_kinds import CacheKind, kinds, summary
from graphfuse.cli.output import Json
from graphfuse.explain.account import count
from graphfuse.files.cache_file import CacheFile

app = typer.Typer(name="cache", cls=exits.Group, help="List, check and remove compiled kernels and tuned knobs.")

_KINDS = "cubins (kernels for GPUs), emulator (kernels for the CPU), tuned (knobs)"
Kinds = Annotated[list[str], typer.Argument(help=f"{_KINDS}; default: all", show_default=False)]


def _kinds(names: list[str]) -> list[CacheKind]:
    known = kinds()
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not kept; there are: {', '.join(known)}")
    return [kind for kind in known.values() if not names or kind.name in names]


def _files(kind: CacheKind) -> list[CacheFile]:
    """Files of a cache. A folder that cannot be read ends the command with FAULT."""
    try:
        return kind.files()
    except PermissionError as error:
        typer.echo(f"{kind.folder()} cannot be read: {error.strerror}; graphfuse doctor has more", err=True)
        raise typer.Exit(exits.FAULT) from error


@app.command()
def ls(
    which: Kinds = (),
    files: Annotated[bool, typer.Option("--files", help="each file, what was used last first")] = False,
    as_json: Json = False,
) -> None:
    """Say where compiled kernels and tuned knobs are, how many and how large they are, and their limits."""
    found = [summary(kind, files) for kind in _kinds(which)]
    if as_json:
        output.print_json(found)
        return
    typer.echo("\n".join(in_columns(map(row, found))))  # not truncated: paths can be copied
    for entry in (entry for one in found for entry in one.get("entries", ())):
        typer.echo(f"{entry['used']}  {count(entry['bytes']):>10}  {entry['path']}")


def row(found: dict[str, Any]) -> tuple[object, ...]:
    """Columns of the line for a `summary`."""
    if "error" in found:
        return found["name"], "", "", found["error"]
    limit = f"of {count(found['limit'])}" if found["limit"] else ""
    return found["name"], counted(found["files"], "file"), f"{count(found['bytes'])} {limit}", found["folder"]


@app.command()
def clear(
    which: Annotated[
        list[str], typer.Argument(help=f"{_KINDS}; default: what a compiler makes again", show_default=False)
    ] = (),
    as_json: Json = False,
) -> None:
    """Remove compiled kernels; they are compiled again when they are needed. Tuned knobs go only where they are named.

    Other processes may go on: they keep what they have loaded.
    """
    chosen = [kind for kind in _kinds(which) if which or not kind.lasting]
    found = [{"name": kind.name, **_removed(Path.unlink, (f.path for f in _files(kind)))} for kind in chosen]
    _tell(found, [f"{one['name']}: {counted(one['removed'], 'file')} removed" for one in found], as_json)
    if any(one["failed"] for one in found):
        raise typer.Exit(exits.FAULT)


@app.command()
def verify(
    which: Kinds = (),
    remove: Annotated[bool, typer.Option("--remove", help="remove it")] = False,
    as_json: Json = False,
) -> None:
    """Read every file that is kept and name each that is truncated, damaged, another one's or of others' making.

    Such a file is never used. Of a table of tuned knobs, sound entries are used and stay. Exits with 1 if there is
    any left.
    """
    found, lines = [], []
    for kind in _kinds(which):
        files = _files(kind)
        bad = kind.damaged(files)
        done = _removed(kind.mend, (path for path, _ in bad) if remove else ())
        found.append(
            {"name": kind.name, "files": len(files), "damaged": [{"path": str(p), "why": w} for p, w in bad], **done}
        )
        lines.append(f"{kind.name}: {counted(len(files), 'file')}, {len(bad)} of no use, {done['removed']} removed")
        lines += [f"  {path}: {why}" for path, why in bad]
    left = sum(len(one["damaged"]) - one["removed"] for one in found)
    if left and not remove:
        lines.append("To remove them: graphfuse cache verify --remove")
    _tell(found, lines, as_json)
    if left:
        raise typer.Exit(exits.FAULT)


def _removed(remove: Callable[[Path], None], paths: Iterable[Path]) -> dict[str, Any]:
    removed, failed = 0, []
    for path in paths:
        try:
            with contextlib.suppress(FileNotFoundError):  # another process removed it first
                remove(path)
            removed += 1
        except OSError as error:
            failed.append({"path": str(path), "why": error.strerror})
    return {"removed": removed, "failed": failed}


def _tell(found: list[dict[str, Any]], lines: list[str], as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    else:
        typer.echo("\n".join(lines))
    for failed in (failed for one in found for failed in one["failed"]):
        typer.echo(f"{failed['path']} cannot be removed: {failed['why']}", err=True)
