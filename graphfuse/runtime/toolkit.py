"""Finds NVRTC and the CUDA headers. Finding loads nothing; `load` does.

It searches in this order: CUDA_HOME, CUDA_PATH, the pip wheels (newer NVRTC versions contain headers), /usr/local/cuda,
and other places of cuda.pathfinder (conda, the linker's paths). A process has one NVRTC, the first that was loaded.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from graphfuse.base import settings
from graphfuse.base.errors import ToolkitNotFoundError

SYSTEM_ROOT = Path("/usr/local/cuda")
# By machine: names of its folder in a toolkit's targets/, and its number in an ELF header.
_TARGETS = {"x86_64": ("x86_64-linux",), "aarch64": ("sbsa-linux", "aarch64-linux")}
_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}

_lock = threading.Lock()
_loaded: "Toolkit | None" = None
_broken: dict[Path, str] = {}


@dataclass(frozen=True)
class Toolkit:
    """An NVRTC and the headers that its programs may include.

    origin: the place where it was found, for messages.
    nvrtc: the library's file.
    version: of NVRTC ("13.5" or longer), "" if no file name has it.
    nvrtc_bytes: size of the file, which differs between patch releases.
    include_dirs, include_version (CUDA_VERSION of cuda.h), bundled (NVRTC's own headers): set by `with_headers`.
    """

    origin: str
    nvrtc: Path
    version: str
    nvrtc_bytes: int
    include_dirs: tuple[Path, ...] = ()
    include_version: int = 0
    bundled: bool = False

    @property
    def fingerprint(self) -> str:
        """Text of everything that a compiled kernel depends on besides source, options and architecture."""
        headers = (self.bundled, self.include_version, *map(str, self.include_dirs))
        return repr((self.version or str(self.nvrtc), self.nvrtc_bytes, headers))


def mend() -> str:
    """Command that installs NVRTC and headers of the CUDA version that cuda.bindings is for."""
    return f'pip install "graphfuse[cu{_wanted_major()}]"'


def find() -> Toolkit:
    """The NVRTC that is loaded, else the one that `load` would try first. Raises ToolkitNotFoundError with all places
    that were searched."""
    if _loaded is not None:
        return _loaded
    path = _in_process()
    if path is not None:
        return _describe(path, "the NVRTC that this process has loaded already")
    return _search(settings.toolkit_roots(), _wheel_roots(), tuple(_broken.items()))


def load() -> Toolkit:
    """Load NVRTC so that cuda.bindings uses it. If a library cannot be loaded, the next one is tried."""
    global _loaded
    with _lock:
        while _loaded is None:
            toolkit = find()
            try:
                # cuda.bindings finds it by cuda.pathfinder, which prefers a library that is loaded already.
                # The builtins are loaded first because NVRTC 13.0's wheel does not find them by itself.
                for path in (*_builtins(toolkit.nvrtc), toolkit.nvrtc):
                    ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
            except OSError as error:
                _broken[toolkit.nvrtc] = f"does not load: {error}"
                continue
            _loaded = toolkit
        return _loaded


def architectures() -> frozenset[int]:
    """Architectures that NVRTC compiles for, such as 90 for SM90. Errors as in `load`, which it calls."""
    load()
    from cuda.bindings import nvrtc

    error, numbers = nvrtc.nvrtcGetSupportedArchs()
    return frozenset(() if error else map(int, numbers))


def with_headers(toolkit: Toolkit) -> Toolkit:
    """The toolkit with include directories, or with `bundled` set. Raises ToolkitNotFoundError if there are none.

    NVRTC is loaded to find out whether it has bundled headers, if CUDA_HOME, CUDA_PATH and the wheels have no headers.
    """
    tried: list[str] = []
    named, system = _places(settings.toolkit_roots(), _wheel_roots(), tried)
    for origin, root in named:
        if found := _with_headers_in(toolkit, origin, root, tried):
            return found
    if _has_bundled_headers(load()):
        return replace(load(), bundled=True)
    tried.append(f"NVRTC {toolkit.version} ({toolkit.nvrtc}): carries no headers of its own, or cuda.core is too old")
    if found := _with_headers_in(toolkit, *system, tried):
        return found
    raise _not_found("the source includes headers, and no CUDA headers were found", tried)


def _wanted_major() -> int:
    import cuda.bindings

    return int(cuda.bindings.__version__.split(".")[0])


def _wheel_roots() -> tuple[Path, ...]:
    # NVIDIA's wheels share the namespace package `nvidia`. Its search path covers every entry of sys.path;
    # cuda.pathfinder searches only the site-packages folders, and cannot find a library without loading it. Before
    # CUDA 13, each wheel has a separate folder.
    spec = importlib.util.find_spec("nvidia")
    paths = spec.submodule_search_locations if spec else None
    major = _wanted_major()
    folders = (f"cu{major}",) if major >= 13 else ("cuda_nvrtc", "cuda_runtime")
    return tuple(Path(path) / folder for path in paths or () for folder in folders)


Place = tuple[str, Path]


def _places(roots: tuple[Place, ...], wheels: tuple[Path, ...], tried: list[str]) -> tuple[tuple[Place, ...], Place]:
    """The roots in order up to the wheels, and the system's root. Missing ones are noted in `tried`."""
    named = dict(roots)
    tried += [f"{name}: not set" for name in ("CUDA_HOME", "CUDA_PATH") if name not in named]
    if not wheels:
        tried.append("pip wheels: no NVIDIA wheel is installed")
    return (*roots, *(("pip wheels", root) for root in wheels)), ("system", SYSTEM_ROOT)


@functools.lru_cache(maxsize=8)
def _search(roots: tuple[Place, ...], wheels: tuple[Path, ...], broken: tuple[tuple[Path, str], ...]) -> Toolkit:
    tried: list[str] = []
    named, system = _places(roots, wheels, tried)
    for origin, root in (*named, system):
        found = _nvrtc_in(origin, root, dict(broken), tried)
        if found is not None:
            return _describe(found, origin)
    found = _by_pathfinder(dict(broken), tried)
    if found is not None:
        return _describe(found, "cuda.pathfinder")
    raise _not_found("NVRTC was not found", tried)


def _not_found(what: str, tried: list[str]) -> ToolkitNotFoundError:
    lines = "".join(f"\n  - {line}" for line in tried)
    return ToolkitNotFoundError(f"{what}\nTried in this order:{lines}\nTo mend it: {mend()}")


def _nvrtc_in(origin: str, root: Path, broken: dict[Path, str], tried: list[str]) -> Path | None:
    major = _wanted_major()
    folders = [root / "lib64", root / "lib"]
    folders += [root / "targets" / target / "lib" for target in _TARGETS.get(platform.machine(), ())]
    reason = f"has no libnvrtc.so.{major}" if root.is_dir() else "is no directory"
    for folder in folders:
        path = folder / f"libnvrtc.so.{major}"
        if path.is_file():
            reason = broken.get(path) or _foreign(path)
            if reason is None:
                return path
            break
        others = sorted(p.name for p in folder.glob("libnvrtc.so.*"))
        if others:
            reason = f"has {others[0]}, but cuda.bindings wants CUDA {major}"
    tried.append(f"{origin} ({root}): {reason}")
    return None


def _foreign(path: Path) -> str | None:
    """Why the file cannot be a library of this machine, by its ELF header."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if head[:4] != b"\x7fELF":
        return f"{path.name} is not a shared library"
    machine = int.from_bytes(head[18:20], "little")
    if machine != _ELF_MACHINE.get(platform.machine(), machine):
        return f"{path.name} is built for another processor"
    # The table of sections is at the end of the file. Loading a truncated library kills the process.
    sections, each, number = (int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return f"{path.name} is truncated" if size < sections + each * number else None


def _with_headers_in(toolkit: Toolkit, origin: str, root: Path, tried: list[str]) -> Toolkit | None:
    major = _wanted_major()
    targets = sorted(root.glob("targets/*/include"))
    own = _TARGETS.get(platform.machine(), ())
    targets.sort(key=lambda p: p.parent.name not in own)
    reason = "has no include/cuda.h"
    for folder in (root / "include", *targets):
        try:
            with (folder / "cuda.h").open("rb") as file:
                head = file.read(1 << 16)
        except OSError:
            continue
        match = re.search(rb"#define\s+CUDA_VERSION\s+(\d+)", head)
        version = int(match[1]) if match else 0
        if version // 1000 == major:
            # Folders of cuda/std and cub in CUDA 13, and of these and crt/ in wheels for CUDA 12.
            beside = (folder / "cccl", *(root.parent / wheel / "include" for wheel in ("cuda_cccl", "cuda_nvcc")))
            folders = (folder, *(path for path in beside if path.is_dir()))
            return replace(toolkit, include_dirs=folders, include_version=version)
        reason = f"its cuda.h is of CUDA {version // 1000}, NVRTC of CUDA {major}"
    tried.append(f"{origin} ({root}): {reason}")
    return None


def _describe(path: Path, origin: str) -> Toolkit:
    real = path.resolve()
    names = (real.name, *(p.name for p in _builtins(path)))
    versions = (m[1] for name in names if (m := re.search(r"\.so\.(\d+\.\d[\d.]*)$", name)))
    return Toolkit(origin, path, next(versions, ""), real.stat().st_size)


def _builtins(nvrtc: Path) -> tuple[Path, ...]:
    """The library that NVRTC itself loads from its own folder; its name has the major and minor version."""
    beside = nvrtc.resolve().parent.glob(f"libnvrtc-builtins.so.{_wanted_major()}.*")
    return tuple(sorted(path for path in beside if re.search(r"\.so\.\d+\.\d+$", path.name)))[-1:]


def _in_process() -> Path | None:
    """The file of an NVRTC that another library, such as torch, has loaded into this process; None if there is none."""
    try:
        ctypes.CDLL(f"libnvrtc.so.{_wanted_major()}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    import cuda.pathfinder

    return Path(cuda.pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)


def _by_pathfinder(broken: dict[Path, str], tried: list[str]) -> Path | None:
    import cuda.pathfinder

    try:
        path = Path(cuda.pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except RuntimeError as error:
        tried.append(f"conda and the linker's paths (cuda.pathfinder): {str(error).splitlines()[0]}")
        return None
    reason = broken.get(path)
    if reason is None and f".so.{_wanted_major()}" not in path.name:
        reason = f"is {path.name}, but cuda.bindings wants CUDA {_wanted_major()}"
    if reason is None:
        return path
    tried.append(f"cuda.pathfinder ({path}): {reason}")
    return None


def _has_bundled_headers(toolkit: Toolkit) -> bool:
    from graphfuse.runtime.cuda_core import ProgramOptions

    # Both must support the option: cuda.core by a field, NVRTC by the function that was added with it.
    library = ctypes.CDLL(str(toolkit.nvrtc), mode=os.RTLD_NOLOAD)
    return hasattr(ProgramOptions, "use_bundled_headers") and hasattr(library, "nvrtcInstallBundledHeaders")
