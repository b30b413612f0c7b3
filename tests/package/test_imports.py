"""What may import what, who reads the environment and CUDA, and what `import graphfuse` costs."""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graphfuse

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = ("engines", "patterns", "benchmarks")
"""Folders that are installed as packages of graphfuse."""

# From the ground up: a module imports only modules of rows above its own (a name stands for a room, or for a module
# beside the rooms). Names in one row do not know each other.
LAYERS = (
    ("base",),
    ("files",),
    ("ops",),
    ("op_graph",),
    ("rows",),
    ("contract",),
    ("codegen",),
    ("patterns",),
    ("engines", "runtime", "emulator"),
    ("tuned_tables",),
    ("planning",),
    ("explain", "tuning"),
    ("api",),
    ("gradients",),
    ("functional",),
    ("torch",),
    ("benchmarks", "testing"),
    ("plugin", "cli"),
    ("__main__",),
)

# The rooms of graphfuse.torch, in the same order.
TORCH_LAYERS = (
    ("sharding", "operators"),
    ("modules", "override"),
    ("analysis",),
    ("attention", "convolutional", "regions"),
    ("compile_backend", "whole_models"),
)

SHARED = {"engines.rows.support", "engines.rows.limits", "engines.rows.kernel", "engines.rows.problem"}
"""What engines have in common."""

LATE = (
    "runtime.cuda_core",
    "runtime.cuda_graphs",
    "runtime.launch",
    "benchmarks.programs.all_reduce",
    "benchmarks.programs.tensor_parallel",
    "benchmarks.programs.model_blocks",
    "benchmarks.programs.model_decoder",
    "benchmarks.programs.follower_functions",
    "benchmarks.programs.follower_session",
    "benchmarks.programs.torch_functions",
)
"""What imports heavy packages at once, and is imported late itself."""

# Closer rules within packages whose modules see each other.
NEVER = {
    "engines": {"engines", "planning", "runtime", "emulator", "api"},
    "patterns": {"engines", "codegen", "runtime"},
    "codegen": {"runtime", "engines", "patterns"},
    "emulator": {"engines", "patterns", "runtime", "ops", "contract.match"},
    "runtime": {"emulator", "engines", "patterns", "codegen", "ops", "contract.match"},
}


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name below graphfuse -> file, of everything that is installed."""
    found = {}
    for folder, prefix in (("graphfuse", ""), *((f, f + ".") for f in OUTSIDE)):
        folder = ROOT / folder
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder).with_suffix("")
            name = prefix + ".".join(part for part in relative.parts if part != "__init__")
            found[name.rstrip(".") or "__init__"] = path
    return found


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@functools.cache
def imports(name: str) -> tuple[tuple[str, str], ...]:
    """(absolute module or attribute, when) of each import: "now", "late" inside a function, "typed" for type checkers
    alone."""
    found = []

    def walk(node, when):
        for child in ast.iter_child_nodes(node):
            its = when
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                its = "typed"
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                its = "late" if when == "now" else when
            if isinstance(child, ast.Import):
                found.extend((alias.name, its) for alias in child.names)
            if isinstance(child, ast.ImportFrom):
                assert not child.level, f"{name}: relative import"
                found.extend((f"{child.module}.{alias.name}", its) for alias in child.names)
            walk(child, its)

    walk(tree(name), "now")
    return tuple(found)


@functools.cache
def inside(name: str) -> tuple[tuple[str, str], ...]:
    """Imports of graphfuse's own modules, dotted below graphfuse."""
    own = [(i.removeprefix("graphfuse."), when) for i, when in imports(name) if i.startswith("graphfuse.")]
    # `from graphfuse.a import b`: b is a module of its own or a name in a.
    return tuple((i if i in modules() else i.rpartition(".")[0] or i, when) for i, when in own)


def package(name: str) -> str:
    return name.split(".")[0]


def levels(layers) -> dict[str, int]:
    return {name: level for level, names in enumerate(layers) for name in names}


LEVEL = levels(LAYERS)
MODULES = sorted(set(modules()) - {"__init__"})


def test_the_table_has_every_module():
    assert {package(name) for name in MODULES} == set(LEVEL)
    assert {name.split(".")[1] for name in MODULES if name.startswith("torch.")} == set(levels(TORCH_LAYERS))


@pytest.mark.parametrize(("within", "layers"), [("", LAYERS), ("torch.", TORCH_LAYERS)], ids=["graphfuse", "torch"])
def test_imports_go_one_way(within, layers):
    """Whether at once, inside a function or for type checkers alone. So no two rooms import each other."""
    level, upward = levels(layers), []
    for name in MODULES:
        me = package(name.removeprefix(within))
        for other, _ in inside(name) if name.startswith(within) else ():
            its = package(other.removeprefix(within))
            if other.startswith(within) and its != me and level[its] >= level[me]:
                upward.append(f"{name} imports {other}, which is not below it")
    assert not upward


def test_closer_rules():
    refused = []
    for name in MODULES:
        if "." in name:  # a package's __init__ lists its members
            for other, _ in inside(name):
                own = other.split(".")[:2] == name.split(".")[:2]  # an engine may be a package
                never = NEVER.get(package(name), ())
                if not own and other not in SHARED and any(f"{other}.".startswith(f"{n}.") for n in never):
                    refused.append(f"{name} imports {other}")
    assert not refused


def test_no_circle():
    """Nor one by imports inside functions or for type checkers: what a module needs can be read without it."""
    try:
        tuple(graphlib.TopologicalSorter({n: {o for o, _ in inside(n)} - {n} for n in MODULES}).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(f"modules that need each other: {error.args[1]}") from None


def test_who_touches_the_outside():
    found = []
    for name in ("__init__", *MODULES):
        names = [i for i, _ in imports(name)]
        cuda = [i for i in names if i.split(".")[0] in ("cuda", "cupy", "pynvml")]
        if cuda and package(name) not in ("runtime", "benchmarks"):
            found.append(f"{name} imports {cuda}")
        # Which others import late in their turn; functional and torch make operators of torch's tensors.
        if name not in LATE:
            late = (f"graphfuse.{m}" for m in LATE)
            heavy = ("torch", "numpy", "cuda", *late)[package(name) in ("functional", "torch") :]
            now = [i for i, when in imports(name) if when == "now" and any(f"{i}.".startswith(f"{h}.") for h in heavy)]
            found += [f"{name} imports {i} at once" for i in now]
        text = ast.unparse(tree(name))
        if name != "base.settings" and re.search(r"\bos\.environ|\bgetenv|\bimport environ", text):
            found.append(f"{name} reads the environment")
    assert not found


def python(code: str, *arguments: str, cwd=None) -> str:
    done = subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light():
    """What takes long to import comes when it is needed; how long it takes is in the build-time record."""
    code = (
        "import sys, graphfuse; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'cuda', 'numpy', 'typer', 'rich'}))"
    )
    assert python(code) == "[]"


def test_building_a_graph_needs_neither_torch_nor_cuda():
    code = (
        "import sys, graphfuse as c\n"
        "g = c.pygraph(io_data_type=c.data_type.HALF, intermediate_data_type=c.data_type.FLOAT)\n"
        "g.relu(g.tensor([2, 3])).set_output(); g.validate(); g.key(); str(g)\n"
        "print([m for m in ('torch', 'cuda', 'cuda.core', 'cuda.bindings') if m in sys.modules])"
    )
    assert python(code) == "[]"


def test_importing_registers_nothing():
    code = (
        "import graphfuse, graphfuse.planning.registry, sys\n"
        "print([m for m in sys.modules if m.startswith(('graphfuse.engines', 'graphfuse.patterns'))])"
    )
    assert python(code) == "[]"


def test_every_engine_and_pattern_is_loaded_once():
    """Under its installed name, from this tree, also when the root is on the path (python -m pytest)."""
    code = (
        "import sys, json, importlib, pkgutil, graphfuse.engines as e, graphfuse.patterns as p\n"
        "for k in (e, p):\n"
        "    for m in pkgutil.walk_packages(k.__path__, f'{k.__name__}.'): importlib.import_module(m.name)\n"
        "print(json.dumps([[n, m.__file__] for n, m in sys.modules.items() if getattr(m, '__file__', None)]))"
    )
    loaded = json.loads(python(code, cwd=ROOT))
    for folder in ("engines", "patterns"):
        for path in (ROOT / folder).rglob("*.py"):
            names = [n for n, file in loaded if Path(file).resolve() == path]
            parts = path.relative_to(ROOT).with_suffix("").parts
            assert names == [".".join(("graphfuse", *parts)).removesuffix(".__init__")]


@pytest.mark.parametrize("folder", OUTSIDE)
def test_the_folders_own_name_is_no_second_way_in(folder):
    """From the root `import engines` would find the folder; it refuses and says what to import."""
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and f"import graphfuse.{folder}" in done.stderr


def test_public_names_are_documented():
    for name in graphfuse.__all__:
        assert getattr(graphfuse, name).__doc__


def test_modules_for_users_show_what_is_theirs():
    """Not the modules that it is made of; and what is not loaded yet, too."""
    code = (
        "import graphfuse; first = dir(graphfuse)\n"
        "import graphfuse.functional as f, graphfuse.torch as t\n"
        "print(first == dir(graphfuse) == sorted([*graphfuse.__all__, 'torch']))\n"
        "print(dir(f) == sorted(f.__all__), dir(t) == sorted(t.__all__), hasattr(f, 'layout'))"
    )
    assert python(code).split() == ["True"] * 4
