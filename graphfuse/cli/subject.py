"""The graphs that a command line names: cases of a bench, or the result of a user's function."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.base.errors import GraphfuseError
from graphfuse.cli import exits

if TYPE_CHECKING:
    from graphfuse.api import pygraph
    from graphfuse.base.device import Device
    from graphfuse.benchmarks.bench import Bench
    from graphfuse.planning.planner import Planner

Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT", help="a bench, or MODULE:FUNCTION (FILE.py:FUNCTION) that returns a graph, not built yet"
    ),
]
Cases = Annotated[
    list[str], typer.Option("--case", help="of a bench, only the case of this name (repeatable); bench --list has them")
]
Quick = Annotated[bool, typer.Option("--quick", help="of a bench, a few of the cases")]


_MOST_SHOWN = 12  # cases in a message
_MACHINERY = ("<frozen importlib", importlib.__file__)  # frames between an import and the file's first line


def graphs(subject: str, cases: Sequence[str], quick: bool) -> dict[str, pygraph]:
    """Graphs by name. Raises BadParameter for a subject that does not exist. An exception in the user's own code is
    printed with its frames only, and ends the command with FAULT."""
    if ":" in subject:
        if cases or quick:
            raise typer.BadParameter(f"{subject} is no bench and has no cases", param_hint="--case, --quick")
        return {subject: _returned(subject)}
    if subject.endswith(".py"):
        raise typer.BadParameter(f"{subject} names a file and no function of it; accepted: {subject}:FUNCTION")
    bench = find_bench(subject)
    known = {str(case): case for case in (bench.quick if quick else bench.cases)}
    for name in cases:
        if name not in known:
            raise typer.BadParameter(f"{name!r}: {subject} has {_some(name, known, subject)}", param_hint="--case")
    return {f"{subject} {name}": known[name].graph() for name in cases or known}


def find_bench(name: str, others: Iterable[str] = ()) -> Bench:
    """The bench of this name. others: names in the error in addition to those of benches."""
    from graphfuse.benchmarks.benches import BENCHES

    if name not in BENCHES:
        raise typer.BadParameter(f"{name!r} is no bench; there are: {', '.join((*BENCHES, *others))}")
    return BENCHES[name]


def planner(graph: pygraph, device: Device | None) -> Planner:
    """The planner of a graph for `device`, which need not be present; None for the graph's own device."""
    from graphfuse.planning.planner import Planner
    from graphfuse.runtime.handle import Handle

    graph.validate()
    return Planner(graph.frozen, graph.handle if device is None else Handle(device), (), ())


def _some(name: str, known: Collection[str], bench: str) -> str:
    """Cases to suggest instead of a name: all, or if they are many, the most similar."""
    if len(known) <= _MOST_SHOWN:
        return ", ".join(map(repr, known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0)
    return f"{', '.join(map(repr, near))} and others; all of them: graphfuse bench {bench} --list"


def _returned(subject: str) -> pygraph:
    from graphfuse.api import pygraph

    place, _, name = subject.rpartition(":")
    if not place or not name:
        raise typer.BadParameter(f"{subject!r} names no function; accepted: MODULE:FUNCTION or FILE.py:FUNCTION")
    with _users_own(place):
        module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        there = [n for n in own if inspect.isfunction(getattr(module, n))]
        raise typer.BadParameter(f"{place} has no function {name!r}; there are: {', '.join(there) or 'none'}")
    if needed := _needed(function):
        raise typer.BadParameter(f"{subject} needs {', '.join(needed)}; accepted: a function without arguments")
    with _users_own(place):  # the function may import modules only now
        graph = function()
    if not isinstance(graph, pygraph):
        raise typer.BadParameter(f"{subject} returned {graph!r}; accepted: a graphfuse.pygraph")
    return graph


@contextmanager
def _users_own(place: str) -> Iterator[None]:
    """Context for the user's code. It finds modules next to its file or in the working directory. Its exceptions are
    printed without frames of graphfuse; exceptions of graphfuse pass."""
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else ""  # like python FILE, python -m MODULE
    sys.path.insert(0, folder)
    try:
        yield
    except (GraphfuseError, typer.BadParameter):
        raise
    except Exception as error:
        above = error.__traceback__
        while above is not None and above.tb_frame.f_code.co_filename.startswith((__file__, *_MACHINERY)):
            above = above.tb_next
        typer.echo("".join(traceback.format_exception(error.with_traceback(above))).rstrip(), err=True)
        raise typer.Exit(exits.FAULT) from error
    finally:
        with suppress(ValueError):  # it may have been removed
            sys.path.remove(folder)


def _needed(function: Callable[..., object]) -> list[str]:
    """Names of required parameters."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a C function without a signature
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise typer.BadParameter(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look for the module there
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module was found, but not one of its imports
        raise typer.BadParameter(f"there is no module {place!r}") from None
