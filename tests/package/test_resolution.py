"""What make installs can be resolved on an ordinary machine: from the public index, by metadata, with nothing local."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
# Mostly the ends: what has wheels for both Pythons has them for those between.
PLACES = [
    *((python, "x86_64") for python in (PYTHONS[0], PYTHONS[-1])),
    *((python, "aarch64") for python in (PYTHONS[0], PYTHONS[-1])),
    *(pytest.param(python, "x86_64", marks=pytest.mark.thorough) for python in PYTHONS[1:-1]),
]
# Variables of make's, and those that give a resolver an index, local wheels or bounds of this machine's own.
FOREIGN = ("MAKE", "MFLAGS", "PIP_", "UV_", "PYTHON")

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("resolution")]


@dataclass(frozen=True)
class Form:
    """A way in which the Makefile installs. target: the file that it makes. variables: make's."""

    target: str
    variables: tuple[str, ...] = ()


FORMS = {
    "the demo without a GPU": Form(".venv/runnable", ("HAS_GPU=",)),
    "the demo with a GPU": Form(".venv/runnable", ("HAS_GPU=yes",)),
    "the tests without a GPU": Form(".venv/installed", ("HAS_GPU=",)),
    "the tests with a GPU": Form(".venv/installed", ("HAS_GPU=yes",)),
    "the site": Form(".venv/documented", ("HAS_GPU=",)),
    "the tests on the oldest torch": Form(".venv-torch-oldest/installed", ("TORCH=oldest",)),
}


@dataclass(frozen=True)
class Wanted:
    """What pip is asked to install. requirements: as on its command line. constraints: files."""

    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}


def wanted(form: Form) -> Wanted:
    """The only installation of the package by a form, as make would run it."""
    command = ["make", "--dry-run", "--always-make", *form.variables, form.target]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment()).stdout
    lines = lines.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if " pip install " in line and " --editable " in line]
    options = argparse.ArgumentParser(exit_on_error=False)
    options.add_argument("--quiet", action="store_true")
    options.add_argument("--no-cache", action="store_true")
    options.add_argument("--constraint", action="append", default=[])
    options.add_argument("--editable", action="append", default=[])
    options.add_argument("requirements", nargs="*")
    found = options.parse_args(shlex.split(line.partition(" pip install ")[2]))
    return Wanted((*found.requirements, *found.editable), tuple(found.constraint))


def cuda_version(found: dict[str, str]) -> str:
    """The major version that NVRTC, the headers and the bindings have in common, of those that there are."""
    suffix = "-cu12" if found["cuda-bindings"].startswith("12.") else ""
    wheels = {f"nvidia-cuda-{name}{suffix}" for name in ("nvrtc", "runtime")} & set(found)
    assert wheels or not any(name.startswith("nvidia-cuda-nvrtc") for name in found)
    (major,) = {found[name].split(".")[0] for name in (*wheels, "cuda-bindings")}
    return major


Resolve = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def resolve(request, tmp_path_factory) -> Iterator[Resolve]:
    """resolve(wanted, python, chip="x86_64") -> the version of each package; where there is none, the test fails with
    the resolver's words. Where no index answers at all it is skipped; in CI it fails."""
    import uv

    folder = tmp_path_factory.mktemp("uv")
    program = uv.find_uv_bin()

    def run(wanted: Wanted, python: str, chip: str = "x86_64") -> subprocess.CompletedProcess:
        command = [program, "pip", "compile", "-", "--quiet", "--no-config", "--no-header", "--no-annotate"]
        command += ["--cache-dir", folder, "--python", sys.executable, "--no-python-downloads"]
        command += ["--python-version", python, "--python-platform", f"{chip}-manylinux_2_28"]
        command += [word for file in wanted.constraints for word in ("--constraint", file)]
        text = "\n".join(wanted.requirements)
        return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, env=environment())

    reached = run(Wanted(("iniconfig",)), PYTHONS[0])
    if reached.returncode:
        words = f"no package index can be reached: {reached.stderr.strip()}"
        pytest.fail(words, pytrace=False) if os.environ.get("CI") == "true" else pytest.skip(words)

    # Resolving waits for the network: what tests of this run ask for is asked for at once.
    cases = [i.callspec.params for i in request.session.items if getattr(i, "originalname", "") == "test_it_resolves"]
    ahead = dict.fromkeys((wanted(FORMS[c["form"]]), c["python"], c["chip"]) for c in cases)
    with ThreadPoolExecutor(8) as pool:
        started = {asked: pool.submit(run, *asked) for asked in ahead}

        def resolve(wanted: Wanted, python: str, chip: str = "x86_64") -> dict[str, str]:
            asked = wanted, python, chip
            done = started[asked].result() if asked in started else run(*asked)
            if done.returncode:
                pytest.fail(f"Python {python}, {chip}, {wanted}:\n{done.stderr}", pytrace=False)
            return dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", done.stdout, re.MULTILINE))

        yield resolve


@pytest.mark.parametrize(("python", "chip"), PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_it_resolves(resolve, note, form, python, chip):
    asked = wanted(FORMS[form])
    found = resolve(asked, python, chip)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join((ROOT / f).read_text() for f in asked.constraints), re.M))
    pins |= dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(asked.requirements), re.M))
    for name, version in pins.items():
        assert found[name] == version or found[name].startswith(f"{version}."), name
    cuda_version(found)
    note(f"resolved: {form}: torch {found['torch']}, cuda-bindings {found['cuda-bindings']}")


@pytest.mark.parametrize("python", (PYTHONS[0], PYTHONS[-1]))
@pytest.mark.parametrize("major", ("12", "13"))
def test_an_extra_brings_one_cuda_version(resolve, major, python):
    """Without a pin of torch's: a build for that version is found. The forms above have it for all Pythons."""
    found = resolve(Wanted((f".[cu{major}]",)), python)
    assert {"torch", "cuda-core"} <= set(found) and cuda_version(found) == major


def test_extras_that_texts_name_are_there():
    named = re.compile(r"(?<![\w.])graphfuse\[([\w,]+)\]")
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.*"),
        *ROOT.rglob("graphfuse/**/*.py"),
    ]
    texts = {
        path: named.findall(path.read_text()) for path in files if path.suffix in (".md", ".py", ".ipynb", ".toml")
    }
    block = PYPROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", block, re.MULTILINE))
    assert sum(texts.values(), [])
    for path, found in texts.items():
        assert {extra for names in found for extra in names.split(",")} <= extras, path


def test_the_oldest_torch_is_the_one_that_pyproject_names():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', PYPROJECT)
    assert f"torch=={oldest}" in wanted(FORMS["the tests on the oldest torch"]).requirements


def test_without_a_gpu_no_cuda_library_comes_but_torchs(resolve):
    """The demo needs none; the tests compile and disassemble."""
    python = PYTHONS[-1]
    tools = {f"nvidia-cuda-{name}" for name in ("nvrtc", "runtime", "crt", "cuobjdump", "nvdisasm")}
    demo, tests = (wanted(FORMS[f"the {what} without a GPU"]) for what in ("demo", "tests"))
    torchs, demos, all_ = (
        {name for name in resolve(what, python) if name.startswith("nvidia-")}
        for what in (Wanted(("torch",), demo.constraints), demo, tests)
    )
    assert demos == torchs
    assert all_ <= torchs | tools


def test_pins_that_torch_excludes_are_seen(resolve, tmp_path):
    """NVRTC's newest minor version is not the one that torch was built with."""
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==2.13.0\nnvidia-cuda-nvrtc==13.5.37\n")
    with pytest.raises(pytest.fail.Exception, match=r"torch==2\.13\.0[\s\S]*unsatisfiable"):
        resolve(Wanted((".[test,cu13]",), (str(pins),)), PYTHONS[0])
