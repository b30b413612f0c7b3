"""From source to library: kept on disk, one clear sentence without a compiler, CUDA's own names refused."""

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from graphfuse.base.errors import CompilerNotFoundError, KernelCompileError, KernelFaultError
from graphfuse.emulator import compiler, kernel, store
from graphfuse.emulator.compiler import Build, build
from support import emulation
from support.small_kernels import CASES, changed

pytestmark = [pytest.mark.emulate, pytest.mark.xdist_group("compiler")]

WARP = CASES["warp"]


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    """Of cache directories that other tests found unusable."""
    monkeypatch.setattr(store, "_given_up", set())
    monkeypatch.setattr(store, "_warned", set())


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """An empty cache: the folder in which compiled kernels are to be found."""
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "emulator"


@pytest.fixture(scope="module")
def machine():
    """What all kernels of these sources share, as other tests keep it: object files, and the library of one of them."""
    folders = {build(WARP.source(), "warp", b).parent for b in (Build.LIBRARY, Build.ADDRESS)}
    names = ("machine.cpp", "library.cpp", "runner.cpp")
    own = {compiler._part_digest(compiler.find(), name, compiler._sources()) for name in names}
    return [p for f in folders for p in f.iterdir() if p.stem in own]


@pytest.fixture
def cache(machine, cold):
    """A cache with the machine and no kernel."""
    cold.mkdir(parents=True)
    for path in machine:
        shutil.copy(path, cold)
    return cold


@pytest.fixture
def empty_machine(monkeypatch):
    """A library finds the machine when it is loaded: until then one with nothing in it will do."""
    plain = compiler._runtime_source
    monkeypatch.setattr(compiler, "_runtime_source", lambda name: "" if name == "machine.cpp" else plain(name))


@pytest.fixture
def compilations(monkeypatch):
    """The commands of a compiler that were run."""
    commands, run = [], subprocess.run

    def recording(command, **options):
        if "-o" in command:
            commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(compiler.subprocess, "run", recording)
    return commands


@pytest.mark.parametrize("damage", [lambda b: b[:4000], lambda b: b"", lambda b: b[:-1], lambda b: b"not a library"])
def test_a_damaged_file_is_compiled_again(cold, empty_machine, compilations, damage):
    """Loading it would end the process."""
    path = build(WARP.source(), "warp", Build.LIBRARY)
    path.write_bytes(damage(path.read_bytes()))
    before = len(compilations)
    assert build(WARP.source(), "warp", Build.LIBRARY) == path
    assert len(compilations) - before == 1


def test_what_is_compiled_is_kept(cold, empty_machine, compilations):
    path = build(WARP.source(), "warp", Build.LIBRARY)
    assert path.parent == cold and len(compilations) == 4  # the machine, its library, the way in, the kernel
    assert build(WARP.source(), "warp", Build.LIBRARY) == path and len(compilations) == 4
    # The machine is the same for the next kernel, which is another file.
    assert build(WARP.source() + "\n", "warp", Build.LIBRARY) != path and len(compilations) == 5
    assert sorted(p.suffix for p in cold.iterdir()) == [".o", ".o", ".so", ".so", ".so"]  # no scratch files
    # What kernels share is compiled again too, if it is damaged.
    for p in cold.iterdir():
        p.write_bytes(p.read_bytes()[:-1])
    assert build(WARP.source(), "warp", Build.LIBRARY) == path and len(compilations) == 9


def test_the_key_has_build_and_machine(cache, request):
    paths = {build(WARP.source(), "warp", b) for b in Build}
    request.getfixturevalue("empty_machine")
    assert build(WARP.source(), "warp", Build.LIBRARY) not in paths
    assert len(paths) == len(Build)


def test_two_at_once_leave_one_whole_file(cache):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(build(WARP.source(), "warp", Build.LIBRARY))) for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(paths)) == 1 and len(paths) == 3
    assert kernel.EmulatedKernel(str(paths[0]), "warp")


def test_what_a_library_asks_for_is_looked_at_too(cache, compilations):
    """The loader would find a machine that is damaged, or none."""
    path = build(WARP.source(), "warp", Build.LIBRARY)
    (machine,) = (p for p in cache.iterdir() if p.suffix == ".so" and p.with_suffix(".o").exists())
    whole, before = machine.read_bytes(), len(compilations)
    for damage in (lambda: machine.write_bytes(whole[:5000]), machine.unlink):
        damage()
        assert build(WARP.source(), "warp", Build.LIBRARY) == path
        kernel.EmulatedKernel(str(path), "warp")
    assert len(compilations) - before == 2  # linked again, of the same object file


def test_another_kernels_library_is_not_taken_for_it(cold, empty_machine, compilations):
    path, other = (build(WARP.source() + end, "warp", Build.LIBRARY) for end in ("", "\n"))
    shutil.copy(other, path)
    before = len(compilations)
    assert build(WARP.source(), "warp", Build.LIBRARY) == path
    assert len(compilations) - before == 1 and path.read_bytes() != other.read_bytes()


def test_a_folder_that_cannot_be_written_costs_a_warning(empty_machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept.*set GRAPHFUSE_CACHE_DIR") as seen:
        assert build(WARP.source(), "warp", Build.LIBRARY).exists()
        assert build(WARP.source(), "warp", Build.LIBRARY).exists()
    assert len(seen) == 1


def test_no_home_directory_costs_a_warning(empty_machine, monkeypatch):
    for name in ("GRAPHFUSE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.warns(
        RuntimeWarning, match="not kept: the user has no home directory.*set GRAPHFUSE_CACHE_DIR"
    ) as seen:
        assert build(WARP.source(), "warp", Build.LIBRARY).exists()
        assert build(WARP.source(), "warp", Build.LIBRARY).exists()
    assert len(seen) == 1


def test_an_entry_that_cannot_be_written_is_compiled_elsewhere(cache):
    """As on a disk that is full, which shows when an entry is written."""
    path = build(WARP.source(), "warp", Build.LIBRARY)
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning) as seen:
        elsewhere = build(WARP.source(), "warp", Build.LIBRARY)
        assert build(WARP.source(), "warp", Build.LIBRARY) == elsewhere
    assert [str(w.message).split(":")[0] for w in seen][1:] == ["compiled kernels are not kept"]
    assert elsewhere.parent != cache and kernel.EmulatedKernel(str(elsewhere), "warp")


def test_a_machine_without_room_is_one_error(monkeypatch, tmp_path):
    source = WARP.source() + "// that no other test has compiled\n"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path / "file"))
    with (
        pytest.warns(RuntimeWarning, match="not kept"),
        pytest.raises(
            KernelCompileError, match="'warp' cannot be compiled for the emulator: .*Not a directory"
        ) as seen,
    ):
        build(source, "warp", Build.LIBRARY)
    assert seen.value.source == source


def test_a_machine_that_does_not_compile_is_one_error(cold, monkeypatch):
    """As where the compiler finds no room for its temporary files."""
    plain = compiler._runtime_source
    monkeypatch.setattr(
        compiler, "_runtime_source", lambda name: "#error full" if name == "machine.cpp" else plain(name)
    )
    with pytest.raises(KernelCompileError, match=r"did not compile the emulator's machine\.cpp\n.*\n?.*full") as seen:
        build(WARP.source(), "warp", Build.LIBRARY)
    assert "full" in seen.value.log and list(cold.iterdir()) == []


def test_a_library_that_is_removed_before_it_is_loaded(cache, monkeypatch):
    """By a process that makes room."""
    paths = []

    def removed(*arguments):
        paths.append(build(*arguments))
        if len(paths) == 1:
            paths[0].unlink()
        return paths[-1]

    monkeypatch.setattr(kernel, "build", removed)
    kernel.load.cache_clear()
    assert kernel.load(WARP.source(), "warp") and len(paths) == 2
    paths[1].unlink()  # now it stays for this process
    case = WARP
    arrays = {n: a.copy() for n, a in case.arrays.items()}
    emulation.run(case.source(), case.kernel, case.launch, arrays)
    assert len(paths) == 2


def test_no_compiler_is_one_sentence(cache, monkeypatch):
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerNotFoundError) as caught:
        build(WARP.source(), "warp", Build.LIBRARY)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("g++ (not found)", "clang++ (not found)", "install g++ or clang++", "CXX"):
        assert part in message


def test_the_users_compiler_comes_first(cold, empty_machine, monkeypatch, tmp_path):
    mine = tmp_path / "mine++"
    mine.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo mine 1.0; else exec g++ "$@" -O0; fi\n')
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert repr(compiler.find()) == "mine 1.0"
    assert build(WARP.source(), "warp", Build.LIBRARY).exists()
    mine.write_text("#!/bin/sh\nexit 1\n")  # broken: the next is tried
    compiler._compiler.cache_clear()
    assert "mine" not in repr(compiler.find())


RAW = """
extern "C" __global__ void raw(float* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
  __syncthreads();
}
"""


def test_cudas_own_names_are_refused(cache):
    with pytest.raises(KernelCompileError) as caught:
        build(RAW, "raw", Build.LIBRARY)
    message = str(caught.value)
    assert "kernel 'raw' does not run on the emulator: it uses __global__" in message
    assert "graphfuse/codegen/headers" in message
    assert caught.value.source == RAW and caught.value.log in message


def test_a_compile_error_names_file_and_line(cache):
    source = WARP.source().replace("gf::warp_barrier();", "gf::warp_barier();")
    line = next(n for n, text in enumerate(WARP.text.splitlines(), 1) if "warp_barrier" in text)
    with pytest.raises(KernelCompileError, match=rf"did not compile it as C\+\+17\n(.*\n)*warp\.cu:{line}:") as caught:
        build(source, "warp", Build.LIBRARY)
    assert "warp_barier" in caught.value.log


def test_kernels_are_free_of_warnings():
    for case in CASES.values():
        command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        done = subprocess.run([*command, "-x", "c++", "-"], input=case.source(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.further
def test_the_machine_runs_without_its_own_stack_switch(cache, monkeypatch):
    """As on processors that have none: ucontext instead."""
    plain = compiler._runtime_source
    monkeypatch.setattr(compiler, "_runtime_source", lambda name: "#define GF_PORTABLE_FIBERS\n" + plain(name))
    for name in ("warp", "bulk_copy", "grid"):
        case = CASES[name]
        found = emulation.checked(
            case.source(), case.kernel, case.launch, case.arrays, builds=[Build.ADDRESS, Build.RACE]
        )
        for number, expected in case.expected(case.arrays).items():
            assert found[number] == np.ascontiguousarray(expected).tobytes()


def test_a_fault_in_this_process_is_an_error_and_no_more():
    case = CASES["async_copy 16"]
    broken = case.source(case.text.replace("gf::async_wait<0>();", "fetch(stages, row, 0);"))
    arrays = {n: a.copy() for n, a in case.arrays.items()}
    for _ in range(3):
        with pytest.raises(KernelFaultError, match=r"async_copy\.cu:\d+: copy_async that the thread never waited for"):
            emulation.run(broken, case.kernel, case.launch, arrays)
        emulation.run(case.source(), case.kernel, case.launch, arrays)
        assert (arrays[1] == case.expected(case.arrays)[1]).all()


def test_more_threads_than_a_process_has_mappings():
    """All of them at once, as on a GPU that is full."""
    ctas = 132
    case = changed(CASES["grid"], grid=ctas, block=512)
    source = case.source().replace("constexpr int THREADS = 32;", "constexpr int THREADS = 512;")
    arrays = {
        0: np.arange(ctas, dtype=np.float32),
        1: np.zeros(ctas, np.float32),
        2: np.zeros((2, ctas, 512), np.float32),
        3: case.arrays[3].copy(),
    }
    emulation.run(source, case.kernel, case.launch, arrays)
    total = arrays[0].sum()
    assert (arrays[2][0] == total).all() and (arrays[2][1] == total + ctas).all()


def test_kernels_share_one_machine(cache):
    """And so its stacks: a process has room for thousands of kernels."""
    case = changed(CASES["grid"], grid=16)
    sizes = []
    for n in range(3):
        arrays = {n: a.copy() for n, a in case.arrays.items()}
        arrays[1], arrays[2] = np.zeros(16, np.float32), np.zeros((2, 16, 32), np.float32)
        arrays[0] = np.arange(16, dtype=np.float32)
        emulation.run(f"{case.source()}// {n}\n", case.kernel, case.launch, arrays)
        sizes.append(len(Path("/proc/self/maps").read_text().splitlines()))
    assert sizes[2] - sizes[1] < 20


def test_a_grid_that_is_no_multiple_of_the_cluster():
    case = changed(CASES["cluster"], grid=6)
    with pytest.raises(KernelFaultError, match="6 CTAs is no multiple of the cluster's 4"):
        emulation.run(case.source(), case.kernel, case.launch, case.arrays)
