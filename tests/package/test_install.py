"""Wheel and sdist hold everything; both run from where they are installed; so does a third party's package."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from graphfuse.cli import new_plugin

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (".py", ".pyi", ".typed", ".cu", ".cuh", ".json", ".cpp", ".hpp")
FOLDERS = {"graphfuse": "graphfuse"} | {f: f"graphfuse/{f}" for f in ("engines", "patterns", "benchmarks")}
CLONE = ROOT / "benchmarks" / "programs"
"""What clones alone have: measurements of models, and what makes the docs from records."""
TEMPLATE = {f"graphfuse/cli/plugin_template/{path}" for path in new_plugin.FILES}

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("install")]


def run(*command: object, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment(**variables)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRAPHFUSE_", "PYTEST_"))}
    return kept | variables


def shipped() -> set[str]:
    """What must be in a wheel, by the name it has there."""
    found = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
        and not {"__pycache__", "plugin_template"}.intersection(path.parts)
        and CLONE not in path.parents
    }
    return found | TEMPLATE


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "docs")
    shutil.copytree(ROOT, copy, ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, copy, cwd=folder)
    return folder


def test_the_wheel_has_every_file(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert shipped() <= names
    # And nothing else beside its metadata: no tests, no second copy at the top level.
    assert {n for n in names if ".dist-info/" not in n} == shipped()


def test_the_sdist_has_every_file(built):
    (sdist,) = built.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    for name in shipped():
        # Of the targets that it lies in, the deepest is that of its folder.
        folder = max((f for f in FOLDERS if name.startswith(FOLDERS[f] + "/")), key=lambda f: len(FOLDERS[f]))
        assert folder + name.removeprefix(FOLDERS[folder]) in names
    assert {"pyproject.toml", "LICENSE", "README.md"} <= names


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request, built, tmp_path_factory) -> Path:
    """The python of an environment with nothing but the package, outside the tree.

    What it depends on comes from the environment of the tests, through a .pth; the
    editable install there is not among it, because .pth files of .pth folders are not read.
    """
    home = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", home / "env", cwd=home)
    python = home / "env" / "bin" / "python"
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (what,) = built.glob("*.whl" if request.param == "wheel" else "*.tar.gz")
    install(what, purelib, home)
    (purelib / "dependencies.pth").write_text("\n".join(dependencies()) + "\n")
    return python


def install(what: Path, target: Path, cwd: Path) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--no-compile",  # what is imported is compiled then
        "--target",
        target,
        what,
        cwd=cwd,
    )


def dependencies() -> list[str]:
    return [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """One for all that are installed: equal sources, equal kernels."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.some(1)
def test_it_runs_from_there(installed, cache):
    home = installed.parent
    where = run(
        installed, "-c", "import graphfuse, graphfuse.engines as e; print(graphfuse.__file__, e.__file__)", cwd=home
    )
    assert str(ROOT) not in where and str(home.parent.parent) in where
    # The main job itself, with nothing of the tree on the path.
    example = shutil.copy(ROOT / "examples" / "rmsnorm_silu.py", home / "sample.py")
    assert "relative error" in run(installed, example, cwd=home, GRAPHFUSE_CACHE_DIR=str(cache))


def test_what_clones_alone_have_says_so(installed, tmp_path):
    done = subprocess.run(
        [installed, "-m", "graphfuse", "bench", "models", "--list"], cwd=tmp_path, capture_output=True, text=True,
        env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and "bench models needs a clone of the repository" in done.stderr


@pytest.mark.some(1)
def test_kernels_can_be_made_from_there(installed):
    code = """
import graphfuse as c
from graphfuse.planning import plan, registry as plugins
from graphfuse.base.device import for_arch
from graphfuse.op_graph.lower import lower
g = c.pygraph(io_data_type=c.data_type.HALF, intermediate_data_type=c.data_type.FLOAT)
y = g.rmsnorm(g.tensor([8, 64]), g.tensor([1, 64]), 1e-5, norm_forward_phase=c.norm_forward_phase.INFERENCE)[0]
g.swish(y).set_output()
g.validate()
known = plugins.installed()
regions, _ = plan.matches(lower(g._ir), known)
ir, mode = regions[0].subgraph.graph, c.heur_mode.OPENSOURCE
(part,) = plan.propose(ir, regions, known.engines, for_arch("sm_90a"), mode).plans[0].parts
print(part.engine.name, len(part.engine.source(part.facts, part.knobs)) > 1000)
"""
    assert run(installed, "-c", code, cwd=installed.parent).split() == ["rows", "True"]


README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

# What README's lines take for granted.
GIVEN = """
from torch import empty, nn
model = nn.Linear(8, 8)
x = w = out = weight = residual = branch = gate = up = empty(1)
"""

OTHER_NAMES = """
import graphfuse
from graphfuse.testing import check

def key(rows: int) -> int:
    return rows

@graphfuse.graph_cache(key)
@graphfuse.jit(graphfuse.heur_mode.A)
def made(rows: int) -> tuple[graphfuse.pygraph, list[graphfuse.Tensor]]:
    with graphfuse.graph(graphfuse.create_handle("cpu")) as (g, tensors):
        tensors.append(g.relu(g.tensor([rows, 8])).set_output())
    return g, tensors

kept, uids = made(3)
again = graphfuse.pygraph().deserialize(kept.serialize())
names: list[str] = [again.deselect_engines(["rows"]).get_plan_name_at_index(0)]
with graphfuse.Graph(inputs=["in"], outputs=["out"]) as called:
    called.relu(x)
print(check(again), graphfuse.explain.FORMATS, uids)
"""

WRONG = """
reveal_type(Z)
graph.rmsnorm(X, W, "small")
graph.rmsnrm(X)
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's own: the first lines of README, its other lines, further names of the public API, and mistakes."""
    first, *rest = README
    for name, text in {"first": first, "rest": "".join(rest) + OTHER_NAMES, "wrong": first + WRONG}.items():
        (tmp_path / f"{name}.py").write_text(GIVEN + text)
    return tmp_path


def types_checked(project: Path, *command: object, **variables: str) -> str:
    files = ("first.py", "rest.py", "wrong.py")
    command = [sys.executable, "-m", *command, *files]
    env = environment(**variables)
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env=env).stdout


@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_a_users_project_passes_mypy_strict(installed, project):
    pytest.importorskip("mypy")
    # What torch is takes half a minute to find out and is not ours to check.
    (project / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    out = types_checked(project, "mypy", "--python-executable", installed)
    lines = out.splitlines()
    assert not [line for line in lines if line.startswith(("first.py", "rest.py"))], out
    for said in ('Revealed type is "graphfuse.op_graph.tensor.Tensor"', '"Tensor | float"', 'no attribute "rmsnrm"'):
        assert said in out
    assert lines[-1].startswith("Found 2 errors in 1 file")


@pytest.mark.some(1)
@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
@pytest.mark.parametrize("mode", ["basic", "strict"])
def test_a_users_project_passes_pyright(installed, project, mode):
    pytest.importorskip("pyright")
    (project / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": mode}))
    quiet = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # else it asks for the newest version
    out = types_checked(project, "pyright", "--pythonpath", installed, "--outputjson", **quiet)
    found = [(Path(d["file"]).name, d["severity"], d["message"]) for d in json.loads(out)["generalDiagnostics"]]
    wrong = "\n".join(message for file, _, message in found if file == "wrong.py")
    assert {file for file, _, _ in found} == {"wrong.py"}, out
    assert ("wrong.py", "information", 'Type of "Z" is "Tensor"') in found
    assert """parameter "epsilon" of type "Tensor | float" """ in wrong and 'attribute "rmsnrm"' in wrong
    # Strict also says that the type of what is not there is unknown.
    assert len(found) == 3 + (mode == "strict")


# How plugins are found is in no file that only one of them could lack.
WHEEL = pytest.mark.parametrize("installed", ["wheel"], indirect=True)

FOREIGN = """
import torch, graphfuse
from graphfuse import data_type, heur_mode
device = "cuda" if torch.cuda.is_available() else "cpu"
a, b = torch.randn(2, 33, 7, device=device)
out = torch.full_like(a, float("nan"))
graph = graphfuse.pygraph(io_data_type=data_type.FLOAT, intermediate_data_type=data_type.FLOAT)
A, B = graph.tensor_like(a), graph.tensor_like(b)
OUT = graph.relu(graph.add(B, A)).set_output()
graph.build([heur_mode.OPENSOURCE])
graph.execute({A: a, B: b, OUT: out})
assert torch.equal(out, torch.relu(a + b))
print(graph.get_plan_name_at_index(0))
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """Where a third party's package is installed."""
    folder = tmp_path_factory.mktemp("foreign")
    source = shutil.copytree(ROOT / "tests" / "foreign_plugin", folder / "source")
    install(source, folder / "target", folder)
    return folder / "target"


@WHEEL
def test_a_foreign_package_brings_a_pattern_and_an_engine(installed, foreign, tmp_path):
    out = run(installed, "-c", FOREIGN, cwd=tmp_path, PYTHONPATH=str(foreign))
    assert out.strip() in ("foreign_add_relu_cpu", "foreign_add_relu_cuda")
    # Without it there is a clear no.
    missing = subprocess.run(
        [installed, "-c", FOREIGN], cwd=tmp_path, capture_output=True, text=True, env=environment()
    )
    assert missing.returncode and "GraphNotSupportedError" in missing.stderr


@pytest.mark.further
@WHEEL
def test_a_broken_foreign_package_is_named(installed, foreign, tmp_path):
    shutil.copytree(foreign, tmp_path / "foreign", ignore=shutil.ignore_patterns("__pycache__"))
    code = tmp_path / "foreign" / "foreign_plugin" / "__init__.py"
    code.write_text(code.read_text() + "\nraise RuntimeError('half a release')\n")
    elsewhere = {"PYTHONPATH": str(tmp_path / "foreign")}

    def ran(code: str, **variables: str) -> subprocess.CompletedProcess:
        env = environment(**elsewhere, **variables)
        return subprocess.run([installed, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env)

    broken = ran(FOREIGN)
    assert broken.returncode and "GraphNotSupportedError" in broken.stderr
    left_out = "engine 'add_relu' of foreign-plugin 0.1.0 is left out: entry point 'add_relu'"
    assert left_out in broken.stderr and "RuntimeError: half a release" in broken.stderr
    # What does not need it goes on.
    general = FOREIGN.replace("OPENSOURCE", "A")
    rest = ran(general)
    assert rest.stdout.strip() == "reference" and rest.stderr.count(left_out) == 1
    quiet = ran(general, GRAPHFUSE_PLUGINS="off")
    assert quiet.stdout.strip() == "reference" and not quiet.stderr
