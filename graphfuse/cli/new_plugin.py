"""``graphfuse new-plugin``: writes a package with a pattern, an engine, its kernel and tests.

The package works as written: bias -> GELU as one kernel, checked by ``graphfuse.testing``. An author replaces the
template, then the facts, the kernel, and what the engine declares.
"""

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli import exits, output
from graphfuse.cli.output import Json

TEMPLATE = Path(__file__).parent / "plugin_template"
"""The package that is written, under another name; in the tree it is ``examples/plugin_bias_gelu``."""

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
"""Its files. Named, as an installation in place leaves others beside them."""

_CPP = frozenset(
    "alignas and asm auto bool char const default delete double enum explicit export extern float friend goto inline "
    "int long mutable namespace new operator or private protected public register short signed sizeof static struct "
    "switch template this throw typedef typename union unsigned using virtual void volatile xor main gf".split()
)
"""Words that are no name of a kernel."""


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
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise typer.BadParameter(f"{target} exists; accepted: a folder that does not", param_hint="--folder") from None
    except OSError as error:
        typer.echo(f"{target} cannot be made: {error.strerror}", err=True)
        raise typer.Exit(exits.FAULT) from error
    written = []
    for path in FILES:
        file = target / _renamed(path, package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_renamed((TEMPLATE / path).read_text(encoding="utf-8"), package), encoding="utf-8")
        written.append(str(file))
    if as_json:
        output.print_json({"name": package, "folder": str(target), "files": written})
        return
    for file in written:
        typer.echo(file)
    typer.echo(f'Next: cd {target} && pip install -e ".[test]" && python -m pytest')


def _renamed(text: str, package: str) -> str:
    """`text` of the template, with the package's name, and the distribution's, which has hyphens."""
    return text.replace("bias_gelu", package).replace("bias-gelu", package.replace("_", "-"))


def _refuse(name: str, package: str) -> None:
    """BadParameter for what cannot be a package, a distribution and a kernel at once, or is known by another's name."""
    if not re.fullmatch(r"[a-z](?:[-_]?[a-z0-9])*", name):
        raise typer.BadParameter(
            f"{name!r} is no name; accepted: lower-case letters and digits, joined by single - or _, a letter first",
            param_hint="NAME",
        )
    if keyword.iskeyword(package) or package in _CPP or package in sys.stdlib_module_names:
        raise typer.BadParameter(f"{name!r} means something else in Python or C++", param_hint="NAME")
    there = importlib.util.find_spec(package)
    if there is not None and there.origin is not None:
        raise typer.BadParameter(f"{name!r} is installed: {there.origin}; names must differ", param_hint="NAME")
    from graphfuse import plugins

    known = plugins.installed()
    taken = {item.name for item in (*known.patterns, *known.engines)} | {"graphfuse", "emulator"}
    if package in taken:
        raise typer.BadParameter(
            f"{name!r} is taken: installed are {', '.join(sorted(taken))}; names must differ", param_hint="NAME"
        )
