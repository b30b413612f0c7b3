"""From a kernel's source to a shared library or program for this machine, kept on disk like the cubins."""

import contextlib
import enum
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from graphfuse import settings
from graphfuse.codegen.render import template
from graphfuse.errors import CompilerNotFoundError, KernelCompileError

_RUNTIME = ("entry.hpp", "fiber.hpp", "launch.hpp", "library.cpp", "machine.cpp", "runner.cpp", "sanitizers.hpp")
# -g1 has the lines and inlined functions that reports name; -g would double the time of sanitizer builds.
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-fno-strict-aliasing", "-ffp-contract=off")
# Warnings are the business of tests; a CUDA compiler's pragmas are none of this one's.
_KERNEL = ("-fvisibility=hidden", "-w")
# Names that only a CUDA compiler knows; a kernel has them from the headers instead.
_CUDA_NAMES = re.compile(
    r"\b(__global__|__device__|__shared__|__launch_bounds__|threadIdx|blockIdx|blockDim|gridDim|__sync\w+|__shfl\w+"
    r"|__ldg|__ldcs|__stcs|__threadfence\w*|__half\w*|__nv_\w+|rsqrtf|atomicAdd|cuda_\w+\.h)\b"
)


class Build(enum.Enum):
    """What is made of a kernel: a library for this process, or a program with sanitizers.

    ADDRESS: AddressSanitizer and UndefinedBehaviorSanitizer. RACE: ThreadSanitizer.
    """

    # Threads' turns are what takes long to run; more optimization makes only compiling longer.
    LIBRARY = ("-Og",)
    # Nothing is optimized away before its address is checked.
    ADDRESS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    # Below -O2, GCC 12 does not instrument the storing of a structure that a function returned.
    RACE = ("-O2", "-fsanitize=thread")


def build(source: str, entry: str, what: Build) -> Path:
    """The path of the library or program, compiled unless it is kept already.

    source: a complete kernel; entry: its kernel's name. Raises CompilerNotFoundError, or
    KernelCompileError with the compiler's log (attributes `log` and `source`).
    """
    compiler = find()
    sources = "".join(map(_runtime_source, _RUNTIME)) + template("graphfuse.codegen.headers", "host.cuh")
    digest = _digest(source, entry, what.value, _COMMON, _KERNEL, sources, compiler.version)
    folder = _folder()
    path = folder / f"{digest}{'.so' if what is Build.LIBRARY else ''}"
    if _whole(path):
        return path
    machine = _part(compiler, "machine.cpp", sources, folder)
    if what is Build.LIBRARY:
        # One machine for all libraries of a process, one in each program.
        main, machine = _part(compiler, "library.cpp", sources, folder), _shared(compiler, machine)
        flags = (*_KERNEL, "-shared", "-Wl,-rpath,$ORIGIN")
    else:
        main, flags = _part(compiler, "runner.cpp", sources, folder), _KERNEL
    command = (*what.value, *flags, "-x", "c++", "-", "-x", "none", str(main), str(machine))
    try:
        _compile(compiler, command, f"{source}\n#define GF_ENTRY {entry}\n{_entry()}", path)
    except _Failed as failed:
        raise _failure(compiler, source, entry, str(failed)) from None
    return path


class Compiler:
    """A C++ compiler: its path and what it calls itself."""

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
    """The compiler of CXX, else g++, else clang++. CompilerNotFoundError where none of them works."""
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


class _Failed(Exception):
    """The compiler's log."""


def _compile(compiler: Compiler, arguments: tuple[str, ...], text: str, path: Path) -> None:
    """Run the compiler on `text`, and put what it makes at `path` in one step."""
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    try:
        command = [compiler.path, *_COMMON, *arguments, "-o", scratch]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=path.parent)
        if done.returncode:
            raise _Failed(done.stderr.strip())
        made = Path(scratch).read_bytes()
        Path(scratch).write_bytes(made + hashlib.sha256(made).digest())
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)


def _whole(path: Path) -> bool:
    """Whether the file is there as `_compile` left it: it ends in a digest of what is before, which the
    loader and the linker ignore. Loading a truncated library would end the process."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(kept[:-size]).digest() == kept[-size:]


def _part(compiler: Compiler, name: str, sources: str, folder: Path) -> Path:
    """The object file of what is the same for all kernels and never instrumented."""
    path = folder / f"{_digest(name, _COMMON, sources, compiler.version)}.o"
    if not _whole(path):
        with tempfile.TemporaryDirectory() as includes:
            for header in ("fiber.hpp", "launch.hpp", "sanitizers.hpp"):
                Path(includes, header).write_text(_runtime_source(header))
            Path(includes, "host.cuh").write_text(template("graphfuse.codegen.headers", "host.cuh"))
            command = ("-O2", "-c", "-I", includes, "-x", "c++", "-")
            _compile(compiler, command, f'#line 1 "{name}"\n{_runtime_source(name)}', path)
    return path


def _shared(compiler: Compiler, part: Path) -> Path:
    """An object file as a library, beside it."""
    path = part.with_suffix(".so")
    if not _whole(path):
        _compile(compiler, ("-shared", f"-Wl,-soname,{path.name}", str(part)), "", path)
    return path


def _runtime_source(name: str) -> str:
    return template("graphfuse.emulator", name)


def _entry() -> str:
    return f'#line 1 "entry.hpp"\n{_runtime_source("entry.hpp")}'


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _failure(compiler: Compiler, source: str, entry: str, log: str) -> KernelCompileError:
    names = sorted(set(_CUDA_NAMES.findall(log)))
    if names:
        why = (
            f"it uses {', '.join(names)}, which only CUDA compilers know; kernels that run on the emulator "
            "use the headers of graphfuse/codegen/headers instead"
        )
    else:
        why = f"{compiler} did not compile it as C++17"
    failure = KernelCompileError(f"kernel {entry!r} does not run on the emulator: {why}\n{log}")
    failure.log, failure.source = log, source
    return failure


def _folder() -> Path:
    """Where what is compiled is kept; a folder for this process where the cache cannot be used."""
    folder = settings.cache_dir() / "emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return _own_folder(str(error))
    return folder


@functools.cache
def _own_folder(why: str) -> Path:
    warnings.warn(
        f"compiled kernels are not kept: {settings.cache_dir()} cannot be used ({why}); "
        "set GRAPHFUSE_CACHE_DIR to a directory that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
    own = tempfile.TemporaryDirectory(prefix="graphfuse-")
    _kept.append(own)  # it is removed when the process ends
    return Path(own.name)


_kept: list[tempfile.TemporaryDirectory] = []
