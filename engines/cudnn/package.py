"""Finds and loads the package ``cudnn`` and its library, or returns the reason why one is missing."""

import contextlib
import ctypes
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from graphfuse.contract.engine import No

OLDEST = (1, 32)
"""Oldest version of nvidia-cudnn-frontend that works. It builds graphs in Python, and tensors are made with uids."""


def load() -> ModuleType | No:
    """The imported package, or what is missing: the package, a version of it, or libcudnn."""
    # Loaded first, because the package remembers if it finds no library.
    _load_library()
    before = sys.modules.get("cudnn")
    package = load_without_library()
    if isinstance(package, No):
        return package
    return _without_library(package, package is before) or package


@functools.cache
def _without_library(package: ModuleType, early: bool) -> No | None:
    """Why the package has no library; None if it has. early: whether it was imported before a library was loaded."""
    if early and hasattr(package, "_dlopen_cudnn"):
        package._dlopen_cudnn()
    try:
        package.backend_version()
    except (RuntimeError, OSError) as error:  # raised by the package's loader of libraries
        return No(f"nvidia-cudnn-frontend finds no libcudnn ({error}): install nvidia-cudnn-cu13, or cuDNN itself")
    return None


@functools.cache
def _load_library() -> None:
    """Load a libcudnn, so that the package finds it.

    The package searches for wheels in one folder. Torch's libcudnn may be in another one, such as in an environment
    with access to the system's packages.
    """
    for library in ("libcudnn.so.9", *map(str, bundled())):
        with contextlib.suppress(OSError):  # try the next one
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            return


def bundled() -> tuple[Path, ...]:
    """Paths of libcudnn in installed wheels. Torch's builds for CUDA depend on one."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ImportError:  # no package nvidia
        return ()
    folders = spec.submodule_search_locations or () if spec else ()
    return tuple(file for folder in folders for file in sorted(Path(folder, "lib").glob("libcudnn.so.[0-9]*")))


def load_without_library() -> ModuleType | No:
    """The package, or what is missing, as ``load``, but without the library: graphs can be made, but not planned."""
    try:
        import cudnn
    except ImportError as error:
        if error.name not in ("cudnn", None):
            return No(f"nvidia-cudnn-frontend cannot be imported: it needs {error.name!r} ({error})")
        return No("nvidia-cudnn-frontend is not installed: install graphfuse[cudnn]")
    version = getattr(cudnn, "__version__", "")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return No(f"the package cudnn is of version {version or 'unknown'}; nvidia-cudnn-frontend {oldest} is needed")
    return cudnn
