import os
import platform
from pathlib import Path

import pytest

from graphfuse.base.errors import ToolkitNotFoundError
from graphfuse.runtime import toolkit

pytestmark = pytest.mark.torch

MAJOR = toolkit._wanted_major()
NAME = f"libnvrtc.so.{MAJOR}"


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The folder of an installed NVRTC."""
    for root in toolkit._wheel_roots():
        if (root / "lib" / NAME).is_file():
            return root
    pytest.skip("no NVRTC wheel is installed")


@pytest.fixture
def root(tmp_path, wheel):
    """make(name, lib=folder) -> a toolkit root whose NVRTC is the wheel's, linked."""

    def make(name: str, lib: str = "lib64") -> Path:
        folder = tmp_path / name / lib
        folder.mkdir(parents=True)
        for library in wheel.glob("lib/libnvrtc*"):
            (folder / library.name).symlink_to(library)
        return tmp_path / name

    return make


def headers(root: Path, folder: str = "include", version: int = MAJOR * 1000) -> Path:
    (root / folder / "cccl").mkdir(parents=True)
    (root / folder / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    return root


def search(*roots: tuple[str, Path], wheels: tuple[Path, ...] = (), broken=()):
    return toolkit._search(roots, wheels, tuple(broken))


@pytest.fixture(autouse=True)
def no_system_root(monkeypatch, tmp_path):
    toolkit._search.cache_clear()
    monkeypatch.setattr(toolkit, "SYSTEM_ROOT", tmp_path / "system")


def fail_pathfinder(monkeypatch):
    import cuda.pathfinder

    def nothing(name):
        raise cuda.pathfinder.DynamicLibNotFoundError("no such library")

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", nothing)


def test_cuda_home_comes_before_cuda_path_before_wheels_before_the_system(root, wheel):
    home, path, system = root("home"), root("path"), root("system")
    named = (("CUDA_HOME", home), ("CUDA_PATH", path))
    assert search(*named, wheels=(wheel,)).nvrtc == home / "lib64" / NAME
    found = search(named[1], wheels=(wheel,))
    assert (found.origin, found.nvrtc) == ("CUDA_PATH", path / "lib64" / NAME)
    assert search(wheels=(wheel,)).origin == "pip wheels"
    assert search().nvrtc == system / "lib64" / NAME


@pytest.mark.parametrize("lib", ["lib64", "lib", *(f"targets/{t}/lib" for t in toolkit._TARGETS[platform.machine()])])
def test_the_layouts_of_a_toolkit(root, lib):
    assert search(("CUDA_HOME", root("home", lib))).nvrtc.parent == root("other", lib).parent / "home" / lib


def test_the_version_comes_from_the_files(root, wheel):
    found = search(("CUDA_HOME", root("home")))
    assert found.version.startswith(f"{MAJOR}.")
    assert found.nvrtc_bytes == (wheel / "lib" / NAME).stat().st_size


def test_another_major_version_is_skipped_with_its_reason(root, tmp_path, monkeypatch):
    old = tmp_path / "old/lib64"
    old.mkdir(parents=True)
    (old / f"libnvrtc.so.{MAJOR - 1}").write_bytes(b"\x7fELF")
    assert search(("CUDA_HOME", tmp_path / "old"), ("CUDA_PATH", root("path"))).origin == "CUDA_PATH"
    fail_pathfinder(monkeypatch)
    reason = f"has libnvrtc.so.{MAJOR - 1}, but cuda.bindings wants CUDA {MAJOR}"
    with pytest.raises(ToolkitNotFoundError, match=reason):
        search(("CUDA_HOME", tmp_path / "old"))


def test_the_error_lists_every_place_with_its_reason_and_the_cure(tmp_path, wheel, monkeypatch):
    fail_pathfinder(monkeypatch)
    for name in ("text", "cpu", "bare", "bad", "cut"):
        (tmp_path / name / "lib64").mkdir(parents=True)
    (tmp_path / "text/lib64" / NAME).write_text("not a library")
    (tmp_path / "bad/lib64" / NAME).write_bytes(b"\x7fELF")
    other = bytearray((wheel / "lib" / NAME).read_bytes()[:64])
    other[18:20] = (8).to_bytes(2, "little")  # MIPS
    (tmp_path / "cpu/lib64" / NAME).write_bytes(other)
    with (wheel / "lib" / NAME).open("rb") as whole:
        (tmp_path / "cut/lib64" / NAME).write_bytes(whole.read(4096))
    bad = tmp_path / "bad/lib64" / NAME
    with pytest.raises(ToolkitNotFoundError) as error:
        search(
            ("CUDA_HOME", tmp_path / "text"),
            ("CUDA_PATH", tmp_path / "cpu"),
            wheels=tuple(tmp_path / name for name in ("bare", "cut", "bad", "nowhere")),
            broken=[(bad, "does not load: truncated")],
        )
    message = str(error.value)
    expected = (
        f"CUDA_HOME ({tmp_path / 'text'}): {NAME} is not a shared library",
        f"CUDA_PATH ({tmp_path / 'cpu'}): {NAME} is built for another processor",
        f"pip wheels ({tmp_path / 'bare'}): has no {NAME}",
        f"pip wheels ({tmp_path / 'cut'}): {NAME} is truncated",
        f"pip wheels ({tmp_path / 'bad'}): does not load: truncated",
        f"pip wheels ({tmp_path / 'nowhere'}): is no directory",
        f"system ({tmp_path / 'system'}): is no directory",
        "cuda.pathfinder): no such library",
    )
    places = [message.find(text) for text in expected]
    assert -1 not in places and places == sorted(places)
    assert f'pip install "graphfuse[cu{MAJOR}]"' in message


def test_the_error_says_which_variables_are_not_set(monkeypatch):
    fail_pathfinder(monkeypatch)
    with pytest.raises(ToolkitNotFoundError, match="(?s)CUDA_HOME: not set.*CUDA_PATH: not set.*no NVIDIA wheel"):
        search()


def any_toolkit(wheel: Path) -> toolkit.Toolkit:
    return toolkit.Toolkit("test", wheel / "lib" / NAME, "13.0", 1)


@pytest.mark.parametrize("folder", ["include", "targets/x86_64-linux/include", "targets/sbsa-linux/include"])
def test_headers_of_every_layout(tmp_path, wheel, monkeypatch, folder):
    home = headers(tmp_path / "home", folder)
    monkeypatch.setenv("CUDA_HOME", str(home))
    found = toolkit.with_headers(any_toolkit(wheel))
    assert found.include_dirs == (home / folder, home / folder / "cccl")
    assert found.include_version == MAJOR * 1000


def test_headers_of_this_machines_target_win(tmp_path, wheel, monkeypatch):
    home = tmp_path / "home"
    for target in ("a-linux", toolkit._TARGETS[platform.machine()][0], "z-linux"):
        headers(home, f"targets/{target}/include")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert toolkit._TARGETS[platform.machine()][0] in str(toolkit.with_headers(any_toolkit(wheel)).include_dirs[0])


def test_headers_of_another_major_version_are_passed_over(tmp_path, wheel, monkeypatch):
    headers(tmp_path / "old", version=(MAJOR - 1) * 1000)
    new = headers(tmp_path / "new")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_PATH", str(new))
    assert toolkit.with_headers(any_toolkit(wheel)).include_dirs[0] == new / "include"


def test_headers_change_the_fingerprint(tmp_path, wheel, monkeypatch):
    bare = any_toolkit(wheel)
    prints = {bare.fingerprint}
    for name in ("one", "two"):
        monkeypatch.setenv("CUDA_HOME", str(headers(tmp_path / name)))
        prints.add(toolkit.with_headers(bare).fingerprint)
    assert len(prints) == 3


@pytest.mark.compile
def test_without_header_folders_nvrtcs_own_come_before_the_systems(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(toolkit, "_wheel_roots", lambda: (wheel,))
    loaded = toolkit.load()
    monkeypatch.setattr(toolkit, "_wheel_roots", lambda: ())
    headers(tmp_path / "system")
    found = toolkit.with_headers(loaded)
    if toolkit._has_bundled_headers(loaded):
        assert found.bundled and not found.include_dirs
    else:
        assert found.include_dirs[0] == tmp_path / "system/include"


@pytest.mark.compile
def test_no_headers_anywhere_is_an_error_that_says_where(wheel, monkeypatch):
    monkeypatch.setattr(toolkit, "_wheel_roots", lambda: (wheel,))
    toolkit.load()
    monkeypatch.setattr(toolkit, "_wheel_roots", lambda: ())
    monkeypatch.setattr(toolkit, "_has_bundled_headers", lambda kit: False)
    expected = "(?s)includes headers.*CUDA_HOME: not set.*NVRTC .*system.*pip install"
    with pytest.raises(ToolkitNotFoundError, match=expected):
        toolkit.with_headers(any_toolkit(wheel))


LOAD = """
import cuda.pathfinder
from graphfuse.runtime import nvrtc, toolkit
kit = toolkit.load()
dl = cuda.pathfinder.load_nvidia_dynamic_lib("nvrtc")
assert dl.was_already_loaded_from_elsewhere, dl
code = nvrtc.compile('extern "C" __global__ void k(float* p) { p[0] = 1; }', "sm_90a", "k")
assert code[:4] == b"\\x7fELF"
from cuda.bindings import nvrtc as bindings
print(kit.origin, dl.abs_path, kit.version, *bindings.nvrtcVersion()[1:])
"""


@pytest.mark.compile
def test_cuda_bindings_uses_the_nvrtc_of_cuda_home(python, root):
    origin, path, version, major, minor = python(LOAD, CUDA_HOME=str(root("home"))).split()
    assert (origin, path) == ("CUDA_HOME", str(root("elsewhere").parent / "home/lib64" / NAME))
    assert version == f"{major}.{minor}"


@pytest.mark.compile
def test_a_library_that_does_not_load_is_passed_over(python, tmp_path, wheel):
    with (wheel / "lib" / NAME).open("rb") as whole:
        header = bytearray(whole.read(64))
    header[40:48] = bytes(8)  # no sections: nothing to see that the rest is missing, until it is loaded
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / NAME).write_bytes(header)
    origin = python(LOAD, CUDA_HOME=str(tmp_path)).rsplit(maxsplit=4)[0]
    assert origin == "pip wheels"


@pytest.mark.compile
def test_an_nvrtc_that_is_loaded_already_is_the_one(python, root, wheel):
    code = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from graphfuse.runtime import toolkit
print(toolkit.find().nvrtc, toolkit.load().nvrtc)
"""
    library = str(wheel / "lib" / NAME)
    assert python(code, library, CUDA_HOME=str(root("home"))) == f"{library} {library}"


def test_finding_loads_nothing(python, wheel):
    code = f"""
from graphfuse.runtime import toolkit
toolkit.find()
print("{NAME}" in open("/proc/self/maps").read())
"""
    assert os.path.exists("/proc/self/maps")
    assert python(code) == "False"
