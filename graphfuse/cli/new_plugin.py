"""``graphfuse new-plugin``: writes a package with a pattern, an engine, its kernel and tests.

The package works as written: add -> relu as one kernel, checked by ``graphfuse.testing``. An author replaces the
template, then the facts, the kernel, and what the engine declares.
"""

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli import exits, output
from graphfuse.cli.output import Json

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[project]
name = "@DISTRIBUTION@"
version = "0.1.0"
description = "add then relu for graphfuse: a pattern, an engine and its kernel"
requires-python = ">=3.10"
dependencies = ["graphfuse"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points."graphfuse.patterns"]
@NAME@ = "@NAME@:PATTERN"

[project.entry-points."graphfuse.engines"]
@NAME@ = "@NAME@:ENGINE"

[tool.setuptools.package-data]
@NAME@ = ["*.cu"]
"""

_README = """\
# @DISTRIBUTION@

A plug-in of graphfuse: `relu(a + b)` as one kernel.

    pip install -e ".[test]"
    python -m pytest
    graphfuse info     # lists it

| file | change it to say |
|---|---|
| `pattern.py` | which nodes fit, in the ops of `pygraph` |
| `facts.py` | what of them the engine looks at |
| `knobs.py` | what may be tuned without changing a result |
| `engine.py` | what is taken (`why_not`, `serves`), and how the kernel is made and launched |
| `@NAME@.cu` | the kernel |
| `tests/` | graphs that are taken; `graphfuse.testing.check` looks for mistakes |
| `pyproject.toml`, `__init__.py`, this file | what it is for |
"""

_INIT = """\
\"\"\"add -> relu as one kernel, for graphfuse.\"\"\"

from @NAME@.engine import ENGINE
from @NAME@.pattern import PATTERN

__all__ = ["ENGINE", "PATTERN"]
"""

_FACTS = """\
\"\"\"What the engine sees of a match: a frozen dataclass, without names and positions.\"\"\"

from dataclasses import dataclass

from graphfuse.dtypes import data_type
from graphfuse.ir import Tensor


@dataclass(frozen=True)
class Facts:
    \"\"\"total: the type that a + b is rounded to before the relu; FLOAT where it is not.\"\"\"

    a: Tensor
    b: Tensor
    output: Tensor
    total: data_type
"""

_PATTERN = """\
\"\"\"Which nodes fit, and what is told of them.\"\"\"

from graphfuse.match import Match, Pattern, PatternGraph
from @NAME@.facts import Facts


def template(g: PatternGraph):
    \"\"\"Captures stand for tensors. Attributes that are left out may have any value.\"\"\"
    total = g.add(g.capture("a"), g.capture("b"))
    return {"output": g.relu(total, negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf"))}


def facts(match: Match) -> Facts:
    tensors = {name: match.graph.tensors[t] for name, t in match.tensors.items()}
    total = match.graph.tensors[match.node("add").output("output")].dtype
    return Facts(**tensors, total=total)


PATTERN = Pattern("@NAME@", template, facts)
"""

_KNOBS = """\
\"\"\"What may be tuned. No knob changes a result.\"\"\"

from dataclasses import dataclass


@dataclass(frozen=True)
class Knobs:
    \"\"\"threads: of a CTA.\"\"\"

    threads: int = 256


ALL = (Knobs(256), Knobs(128), Knobs(512))
"""

_ENGINE = """\
\"\"\"What is taken, with which knobs, and how the kernel is made and launched.\"\"\"

from collections.abc import Sequence

from graphfuse.codegen.render import render, template
from graphfuse.device import Device
from graphfuse.dtypes import data_type
from graphfuse.engine import Address, Constant, KernelEngine, Launch, No
from graphfuse.enums import heur_mode
from graphfuse.served import Served
from @NAME@.facts import Facts
from @NAME@.knobs import ALL, Knobs

TYPES = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)


class Engine(KernelEngine[Facts, Knobs]):
    \"\"\"Tensors of one shape, each float32, half or bfloat16.\"\"\"

    name = "@NAME@"
    facts = Facts
    knobs = Knobs
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    # Declare nothing that the kernel does not do: planning declines the rest. Tensors are row-major without gaps and in
    # memory, nodes compute in FLOAT.
    serves = Served(rounding=True)
    entry = "@NAME@"

    def why_not(self, facts: Facts, device: Device) -> No | None:
        if not device.runs_kernels:
            return No(f"it needs a CUDA device or the emulator; planning is for {device}")
        accepted = ", ".join(dtype.name for dtype in TYPES)
        for t in (facts.a, facts.b, facts.output):
            if t.dtype not in TYPES:
                return No(f"{t}: accepted: {accepted}")
            if t.dim != facts.output.dim:
                return No(f"{t}: accepted: the shape of {facts.output}")
        if facts.total not in TYPES:
            return No(f"the sum is rounded to {facts.total.name}; accepted: {accepted}")
        return None

    def propose(self, facts: Facts, device: Device, mode: heur_mode) -> Sequence[Knobs]:
        return ALL if mode is heur_mode.B else ALL[:1]

    def illegal(self, facts: Facts, knobs: Knobs, device: Device) -> No | None:
        return None if knobs in ALL else No(f"accepted: {', '.join(map(str, ALL))}")

    def source(self, facts: Facts, knobs: Knobs) -> str:
        types = {"A": facts.a.dtype, "B": facts.b.dtype, "Output": facts.output.dtype, "Total": facts.total}
        prelude = '#include "graphfuse/types.cuh"\\n'
        prelude += "".join(f"using {name} = {dtype.facts.ctype};\\n" for name, dtype in types.items())
        prelude += f"constexpr int THREADS = {knobs.threads};"
        return render(template("@NAME@", "@NAME@.cu"), prelude, "@NAME@.cu")

    def launch(self, facts: Facts, knobs: Knobs) -> Launch:
        n = facts.output.elements
        tensors = (Address(t.id) for t in (facts.a, facts.b, facts.output))
        return Launch(grid=-(-n // knobs.threads), block=knobs.threads, arguments=(*tensors, Constant("int64", n)))


ENGINE = Engine()
"""

_KERNEL = """\
// relu(a + b), a thread for each element. The prelude, generated.cuh, has THREADS and the types A, B, Output and Total.
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

extern "C" GF_KERNEL(THREADS) @NAME@(const A* a, const B* b, Output* output, gf::i64 n) {
  const gf::i64 i = gf::i64(gf::block_index()) * THREADS + gf::thread_index();
  if (i < n) {
    const float total = gf::rounded<Total>(gf::scalar(a + i) + gf::scalar(b + i));
    const gf::Bytes<sizeof(Output)> result = {{gf::encode<Output>(gf::max(total, 0.0f))}};
    gf::store<sizeof(Output), sizeof(Output)>(output + i, result);
  }
}
"""

_TEST = """\
\"\"\"Installed, found by name, and right on every problem that is taken.\"\"\"

import graphfuse
from graphfuse import data_type, heur_mode, plugins, testing


def test_it_is_installed():
    found = {p.kind: p.state for p in plugins.listed() if p.name == "@NAME@"}
    assert found == {"pattern": "loaded", "engine": "loaded"}


def test_it_takes_a_graph():
    graph = graphfuse.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    A, B = graph.tensor([30, 64], name="A"), graph.tensor([30, 64], name="B")
    graph.relu(graph.add(A, B)).set_output()
    graph.build([heur_mode.OPENSOURCE], engines=["@NAME@", "emulator"])
    assert "@NAME@" in graph.get_plan_name_at_index(0)


def test_it_is_right():
    \"\"\"Raises with a report of what is wrong. More problems and kernels: problems=200, programs=20.\"\"\"
    print(testing.check("@NAME@", problems=12, programs=2))
"""

FILES: Mapping[str, str] = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    "src/@NAME@/__init__.py": _INIT,
    "src/@NAME@/facts.py": _FACTS,
    "src/@NAME@/pattern.py": _PATTERN,
    "src/@NAME@/knobs.py": _KNOBS,
    "src/@NAME@/engine.py": _ENGINE,
    "src/@NAME@/@NAME@.cu": _KERNEL,
    "tests/test_@NAME@.py": _TEST,
}
"""By path. @NAME@ is the package's, @DISTRIBUTION@ that with hyphens."""

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
    for path, text in FILES.items():
        file = target / path.replace("@NAME@", package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_filled(text, package), encoding="utf-8")
        written.append(str(file))
    if as_json:
        output.print_json({"name": package, "folder": str(target), "files": written})
        return
    for file in written:
        typer.echo(file)
    typer.echo(f'Next: cd {target} && pip install -e ".[test]" && python -m pytest')


def _filled(text: str, package: str) -> str:
    return text.replace("@NAME@", package).replace("@DISTRIBUTION@", package.replace("_", "-"))


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
