"""What may import what, who reads the environment and CUDA, and what `import graphfuse` costs."""

import ast
import functools
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

# From the ground up: a module imports only modules of rows above its own (a name stands
# for its whole package). Names in one row do not know each other.
LAYERS = (
    ("errors",),
    ("cudnn_keywords", "cudnn_names"),
    ("dtypes", "enums"),
    ("device", "json_values", "kept_file", "reordering", "rounding", "sealed", "settings"),
    ("memory", "workspace"),
    ("ops",),
    ("ir",),
    ("rows", "tensor", "verify", "vocabulary", "served", "traffic"),
    ("recorded", "lower", "op_methods", "cover"),
    ("engine", "freeze", "graph_json", "printing"),
    ("arguments",),
    ("launch_limits", "match", "codegen", "overrides", "row_counts", "signature"),
    ("patterns",),
    ("engines", "runtime", "emulator"),
    ("plugins", "tables", "record"),
    ("guard",),
    ("plan",),
    ("recipe",),
    ("planner", "serialized"),
    ("explain", "reshaped", "tuning"),
    ("user_graph",),
    ("building", "functional", "wrapper"),
    ("torch",),
    ("benchmarks", "testing"),
    ("cli",),
    ("__main__",),
)

SHARED = {"engines.rows.support", "engines.rows.limits", "engines.rows.kernel", "engines.rows.problem"}
"""What engines have in common."""

LATE = ("runtime.cuda_core", "benchmarks.programs.model_blocks", "benchmarks.programs.model_decoder")
"""What imports heavy packages at once, and is imported late itself."""

# Closer rules within packages whose modules see each other.
NEVER = {
    "engines": {"engines", "plan", "planner", "plugins", "runtime", "emulator", "user_graph"},
    "patterns": {"engines", "codegen", "runtime"},
    "codegen": {"runtime", "engines", "patterns"},
    "emulator": {"engines", "patterns", "runtime", "ops", "match"},
    "runtime": {"emulator", "engines", "patterns", "codegen", "ops", "match"},
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Dotted name below graphfuse -> syntax tree, of everything that is installed."""
    found = {}
    for folder, prefix in (("graphfuse", ""), *((f, f + ".") for f in OUTSIDE)):
        folder = ROOT / folder
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder).with_suffix("")
            name = prefix + ".".join(part for part in relative.parts if part != "__init__")
            found[name.rstrip(".") or "__init__"] = ast.parse(path.read_text())
    return found


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

    walk(modules()[name], "now")
    return tuple(found)


def inside(name: str) -> list[tuple[str, str]]:
    """Imports of graphfuse's own modules, dotted below graphfuse."""
    own = [(i.removeprefix("graphfuse."), when) for i, when in imports(name) if i.startswith("graphfuse.")]
    # `from graphfuse.a import b`: b is a module of its own or a name in a.
    return [(i if i in modules() else i.rpartition(".")[0] or i, when) for i, when in own]


def package(name: str) -> str:
    return name.split(".")[0]


LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(set(modules()) - {"__init__"})


def test_the_table_has_every_module():
    assert {package(name) for name in MODULES} == set(LEVEL)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    """Whether at once, inside a function or for type checkers alone."""
    me = package(name)
    for other, _ in inside(name):
        its = package(other)
        assert its == me or LEVEL[its] < LEVEL[me], f"{name} imports {other}, which is not below it"


@pytest.mark.parametrize("name", MODULES)
def test_closer_rules(name):
    if "." in name:  # a package's __init__ lists its members
        for other, _ in inside(name):
            own = other.split(".")[:2] == name.split(".")[:2]  # an engine may be a package
            if not own and other not in SHARED:
                assert package(other) not in NEVER.get(package(name), ()), f"{name} imports {other}"


@pytest.mark.parametrize("name", MODULES)
def test_no_circle(name):
    """Nor one by imports inside functions or for type checkers: what a module needs can be read without it."""
    before = {other: name for other, _ in inside(name)}
    waiting = list(before)
    while waiting:
        module = waiting.pop()
        for other, _ in inside(module):
            if other not in before:
                before[other] = module
                waiting.append(other)
    assert name not in before, f"{name} is imported by {before.get(name)}, which it needs"


@pytest.mark.parametrize("name", ["__init__", *MODULES])
def test_who_touches_the_outside(name):
    names = [i for i, _ in imports(name)]
    cuda = [i for i in names if i.split(".")[0] in ("cuda", "cupy", "pynvml")]
    assert not cuda or package(name) in ("runtime", "benchmarks")
    # Which others import late in their turn; functional and torch are for torch's tensors, whose operators they make.
    if name not in LATE:
        late = (f"graphfuse.{m}" for m in LATE)
        heavy = ("torch", "numpy", "cuda", *late)[package(name) in ("functional", "torch") :]
        assert not [i for i, when in imports(name) if when == "now" and any(f"{i}.".startswith(f"{h}.") for h in heavy)]
    text = ast.unparse(modules()[name])
    if name != "settings":
        assert not re.search(r"\bos\.environ|\bgetenv|\bimport environ", text)


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
        "import graphfuse, graphfuse.plugins, sys\n"
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
