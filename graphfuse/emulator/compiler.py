"""Compiles a kernel's source to a shared library for this machine, which is cached on disk."""

import enum
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from graphfuse.base import settings
from graphfuse.base.errors import CompilerNotFoundError, KernelCompileError
from graphfuse.codegen.render import template
from graphfuse.emulator import store
from graphfuse.emulator.store import LibraryStore

_RUNTIME = ("entry.hpp", "fiber.hpp", "launch.hpp", "library.cpp", "machine.cpp", "runner.cpp", "sanitizers.hpp")
_COMMON = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off")
# Debug information for the lines and inlined functions in sanitizers' reports; -g would double the time to compile.
_LINES = "-g1"
# No warnings: tests look for these, and a CUDA compiler's pragmas would cause more.
_KERNEL = ("-fvisibility=hidden", "-w", "-shared", "-Wl,-rpath,$ORIGIN")
# Libraries that a kernel calls directly. Others come with the machine's library; searching them takes the linker longer
# than linking.
_LIBRARIES = ("-nostdlib", "-lm", "-lgcc")
# Names that only a CUDA compiler knows; kernels for the emulator use the headers instead.
_CUDA_NAMES = re.compile(
    r"\b(__global__|__device__|__shared__|__launch_bounds__|threadIdx|blockIdx|blockDim|gridDim|__sync\w+|__shfl\w+"
    r"|__ldg|__ldcs|__stcs|__threadfence\w*|__half\w*|__nv_\w+|rsqrtf|atomicAdd|cuda_\w+\.h)\b"
)


class Build(enum.Enum):
    """Build of a kernel: a library for this process, or for a program with sanitizers.

    ADDRESS: AddressSanitizer and UndefinedBehaviorSanitizer. RACE: ThreadSanitizer.
    """

    # Switching fibers takes most of the run time; more optimization would only lengthen compilation.
    LIBRARY = ("-Og",)
    # No access is optimized away before its address is checked.
    ADDRESS = (_LINES, "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    # Below -O2, GCC 12 does not instrument the store of a structure that a function returned. At any level, it does not
    # instrument one in a called function, so all functions are inlined. Other builds call them, which compiles faster.
    RACE = (_LINES, "-O2", "-fsanitize=thread", "-DGF_INLINED")


def build(source: str, entry: str, what: Build) -> Path:
    """Path of a kernel's library, which is compiled unless it is cached.

    source: a complete kernel. entry: the kernel's name. Raises CompilerNotFoundError, or KernelCompileError with the
    compiler's log (attributes `log` and `source`). If the cache directory cannot be used, there is a warning, and each
    process compiles.
    """
    failed = f"kernel {entry!r} cannot be compiled for the emulator"
    return _somewhere(lambda compiler, kept: _built(compiler, source, entry, what, kept), failed, source)


def runner(what: Build) -> Path:
    """Path of the program with sanitizers that loads kernels' libraries of this build. Errors as in `build`."""
    failed = "the emulator's runner.cpp cannot be compiled"
    return _somewhere(lambda compiler, kept: _runner(compiler, what, kept), failed, "")


def _somewhere(make: Callable[["Compiler", LibraryStore], Path], failed: str, source: str) -> Path:
    """Path of the file that `make` makes in the cache directory, or if that cannot be used, in a store of this process.

    failed, source: of the error if neither can be used."""
    compiler, kept = find(), store.cache()
    if kept is not None:
        try:
            return make(compiler, kept)
        except OSError as error:
            store.give_up(error)
    try:
        return make(compiler, store.own())
    except OSError as error:
        raise _failure(f"{failed}: {error}", "", source) from error


def _built(compiler: "Compiler", source: str, entry: str, what: Build, kept: LibraryStore) -> Path:
    sources = _sources()
    name = f"{_digest(source, entry, what.value, _COMMON, _KERNEL, _LIBRARIES, sources, compiler.version)}.so"
    path = kept.find(name)
    # All libraries of a process link to one shared library of the machine; a program contains the machine.
    machine = (str(_shared(compiler, sources, kept)),) if what is Build.LIBRARY else ()
    if path is not None:
        return path
    main = str(_part(compiler, "library.cpp", sources, kept))
    command = (*what.value, *_KERNEL, "-x", "c++", "-", "-x", "none", main, *machine, *_LIBRARIES)
    text = f'{source}\n#define GF_ENTRY {entry}\n#line 1 "entry.hpp"\n{_runtime_source("entry.hpp")}'

    def why(log: str) -> str:
        return f"kernel {entry!r} does not run on the emulator: {_why(compiler, log)}"

    return kept.keep(name, _compile(compiler, command, text, why, source))


def _runner(compiler: "Compiler", what: Build, kept: LibraryStore) -> Path:
    """Path of the program with sanitizers: the main function and the machine."""
    sources = _sources()
    name = _digest("runner", what.value, _COMMON, sources, compiler.version)
    found = kept.find(name)
    if found is not None:
        return found
    parts = [str(_part(compiler, part, sources, kept)) for part in ("runner.cpp", "machine.cpp")]
    # No part is instrumented, so the linker would omit the sanitizers' libraries, which kernels need.
    command = (*what.value, "-Wl,--no-as-needed", "-rdynamic", *parts, "-ldl")
    return kept.keep(name, _link(compiler, command, "runner.cpp"))


class Compiler:
    """A C++ compiler: its path and version text."""

    def __init__(self, path: str):
        self.path = path
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        self.version = done.stdout

    def __repr__(self) -> str:
        return self.version.splitlines()[0]


@functools.cache
def _compiler(path: str) -> Compiler:
    return Compiler(path)


def find() -> Compiler:
    """The compiler of CXX, else g++, else clang++. Raises CompilerNotFoundError if none of them works."""
    tried = []
    for name in settings.host_compilers():
        path = shutil.which(name)
        if path is None:
            tried.append(f"{name} (not found)")
            continue
        try:
            return _compiler(path)
        except (OSError, subprocess.CalledProcessError) as error:
            tried.append(f"{name} ({error})")
    raise CompilerNotFoundError(
        f"running kernels on the CPU needs a C++17 compiler; tried {', '.join(tried)}: "
        "install g++ or clang++, or name one in CXX"
    )


def _link(compiler: Compiler, arguments: tuple[str, ...], name: str) -> bytes:
    return _compile(compiler, arguments, "", lambda log: f"{compiler} did not link the emulator's {name}", "")


def _compile(
    compiler: Compiler, arguments: tuple[str, ...], text: str, why: Callable[[str], str], source: str
) -> bytes:
    """Bytes that the compiler makes of `text`. why, source: message for the compiler's log, and source, of an error.

    It works in a temporary folder, so that a failed write there differs from an unusable cache directory."""
    with tempfile.TemporaryDirectory(prefix="graphfuse-") as folder:
        made = Path(folder, "made")
        command = [compiler.path, *_COMMON, *arguments, "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            log = done.stderr.strip()
            raise _failure(why(log), log, source)
        return made.read_bytes()


def _part(compiler: Compiler, name: str, sources: str, kept: LibraryStore) -> Path:
    """Path of the object file of a source that is the same for all kernels and never instrumented."""
    entry = f"{_part_digest(compiler, name, sources)}.o"
    found = kept.find(entry)
    if found is not None:
        return found
    text = f'#line 1 "{name}"\n{_runtime_source(name)}'
    with tempfile.TemporaryDirectory() as includes:
        for header in ("fiber.hpp", "launch.hpp", "sanitizers.hpp"):
            Path(includes, header).write_text(_runtime_source(header))
        Path(includes, "host.cuh").write_text(template("graphfuse.codegen.headers", "host.cuh"))
        # -O1: -O2 takes the compiler half as long again, and kernels run no faster.
        command = (_LINES, "-O1", "-c", "-I", includes, "-x", "c++", "-")
        made = _compile(compiler, command, text, lambda log: f"{compiler} did not compile the emulator's {name}", text)
    return kept.keep(entry, made)


def _shared(compiler: Compiler, sources: str, kept: LibraryStore) -> Path:
    """Path of the machine as a shared library."""
    entry = f"{_part_digest(compiler, 'machine.cpp', sources)}.so"
    found = kept.find(entry)
    if found is not None:
        return found
    part = _part(compiler, "machine.cpp", sources, kept)
    return kept.keep(entry, _link(compiler, ("-shared", f"-Wl,-soname,{entry}", str(part)), "machine.cpp"))


def _part_digest(compiler: Compiler, name: str, sources: str) -> str:
    return _digest(name, _COMMON, sources, compiler.version)


def _sources() -> str:
    """Digest of all sources that are the same for all kernels."""
    return _digest_once(*map(_runtime_source, _RUNTIME), template("graphfuse.codegen.headers", "host.cuh"))


def _runtime_source(name: str) -> str:
    return template("graphfuse.emulator", name)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


_digest_once = functools.lru_cache(maxsize=4)(_digest)


def _why(compiler: Compiler, log: str) -> str:
    names = sorted(set(_CUDA_NAMES.findall(log)))
    if names:
        return (
            f"it uses {', '.join(names)}, which only CUDA compilers know; kernels that run on the emulator "
            "use the headers of graphfuse/codegen/headers instead"
        )
    return f"{compiler} did not compile it as C++17"


def _failure(why: str, log: str, source: str) -> KernelCompileError:
    failure = KernelCompileError(f"{why}\n{log}" if log else why)
    failure.log, failure.source = log, source
    return failure
