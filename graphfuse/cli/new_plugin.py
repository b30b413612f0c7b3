"""``graphfuse new-plugin``: writes a package with a pattern, an engine, its kernel and tests.

The package works as written: bias -> GELU as one kernel, checked by ``graphfuse.testing``. An author replaces the
template, then the facts, the kernel, and what the engine declares.
"""

import contextlib
import importlib.util
import keyword
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli import exits, output
from graphfuse.cli.output import Json

TEMPLATE = Path(__file__).parent / "plugin_template"
"""The package that is written under another name. In the repository it is ``examples/plugin_bias_gelu``."""

FILES = (
    "pyproject.toml",
    "README.md",
    "src/bias_gelu/__init__.py",
    "src/bias_gelu/facts.py",
    "src/bias_gelu/pattern.py",
    "src/bias_gelu/knobs.py",
    "src/bias_gelu/engine.py",
    "src/bias_gelu/bias_gelu.cu",
    "tests/test_bias_gelu.py",
)
"""Files of the template. They are listed, because an editable installation adds other files to the folder."""

_LONGEST = 100
"""Longest name, in characters. File names, of at most 255 bytes, contain it, here and where it is installed."""


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the package: lower-case letters, digits, - and _")],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="where it is written; default: NAME, in this one")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plug-in package that passes its own tests: entry points, a pattern, an engine, a kernel, tests.

    The folder must not exist. Exits with 2 for a name that cannot be one, and for a folder that is there.
    """
    package = name.replace("-", "_")
    _refuse(name, package)
    target = Path(name) if folder is None else folder
    texts = {
        target / _renamed(path, package): _renamed((TEMPLATE / path).read_text(encoding="utf-8"), package)
        for path in FILES
    }
    made = [path for path in (target, *target.parents) if not os.path.lexists(path)]
    try:
        target.mkdir(parents=True)
        for file, text in texts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise typer.BadParameter(f"{target} exists; accepted: a folder that does not", param_hint="--folder") from None
    except OSError as error:
        for path in made[-1:]:  # it contains the others
            shutil.rmtree(path, ignore_errors=True)
        typer.echo(f"{target} cannot be made: {error.strerror}", err=True)
        raise typer.Exit(exits.FAULT) from error
    written = [*map(str, texts)]
    if as_json:
        output.print_json({"name": package, "folder": str(target), "files": written})
        return
    for line in written:
        typer.echo(line)
    typer.echo(f'Next: cd {target} && pip install -e ".[test]" && python -m pytest')


def _renamed(text: str, package: str) -> str:
    """`text` of the template, with the names of the package and of the distribution, which has hyphens."""
    return text.replace("bias_gelu", package).replace("bias-gelu", package.replace("_", "-"))


def _refuse(name: str, package: str) -> None:
    """Raises BadParameter for a name that cannot be a package and a distribution, or is in use."""
    if not re.fullmatch(r"[a-z](?:[-_]?[a-z0-9])*", name) or len(name) > _LONGEST:
        raise typer.BadParameter(
            f"{name!r} is no name; accepted: lower-case letters and digits, joined by single - or _, a letter first, "
            f"at most {_LONGEST} characters",
            param_hint="NAME",
        )
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise typer.BadParameter(f"{name!r} means something else in Python", param_hint="NAME")
    if where := next(_installed(name, package), None):
        raise typer.BadParameter(f"{name!r} is installed: {where}; names must differ", param_hint="NAME")
    from graphfuse import engines, patterns
    from graphfuse.planning import registry as plugins

    known = plugins.installed()
    first_party = (*engines.ALL, *(pattern for some in patterns.OF_ENGINES.values() for pattern in some))
    in_use = {item.name for item in (*known.patterns, *known.engines, *first_party)} | {"graphfuse", "emulator"}
    if package in in_use:
        raise typer.BadParameter(
            f"{name!r} is taken: installed are {', '.join(sorted(in_use))}; names must differ", param_hint="NAME"
        )


def _installed(name: str, package: str) -> Iterator[str]:
    """Installed modules and distributions of this name."""
    there = importlib.util.find_spec(package)
    # Folders without __init__.py have no origin; any folder in the working directory is such a module.
    found = [] if there is None else [there.origin] if there.origin else there.submodule_search_locations or ()
    yield from (place for place in found if there.origin or Path(place).resolve().parent != Path.cwd())
    with contextlib.suppress(metadata.PackageNotFoundError):
        about = metadata.distribution(name)
        yield f"{about.metadata['Name']} {about.version}"
