"""Finds the package ``cudnn`` and its library, or the reason why they are missing."""

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
"""Of nvidia-cudnn-frontend. Graphs are built in Python, with uids given when tensors are made."""


def load() -> ModuleType | No:
    """The imported package, or what is missing: the package, a version of it, or libcudnn."""
    # The package keeps that it found none when it is first asked, so that this comes before.
    _load_library()
    before = sys.modules.get("cudnn")
    package = load_without_library()
    if isinstance(package, No):
        return package
    return _without_library(package, package is before) or package


@functools.cache
def _without_library(package: ModuleType, early: bool) -> No | None:
    """early: whether the package was imported before a library was loaded for it."""
    if early and hasattr(package, "_dlopen_cudnn"):
        package._dlopen_cudnn()
    try:
        package.backend_version()
    except (RuntimeError, OSError) as error:  # what its loader of libraries raises
        return No(f"nvidia-cudnn-frontend finds no libcudnn ({error}): install nvidia-cudnn-cu13, or cuDNN itself")
    return None


@functools.cache
def _load_library() -> None:
    """Load a libcudnn that no search finds by name, so that the package does.

    The package looks into one folder for wheels. Torch's may be in another, as where an environment sees the system's
    packages.
    """
    for library in ("libcudnn.so.9", *map(str, bundled())):
        with contextlib.suppress(OSError):  # the next one may do
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            return


def bundled() -> tuple[Path, ...]:
    """libcudnn in wheels, wherever Python finds them: torch's builds for CUDA come with one."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ImportError:  # no package nvidia
        return ()
    folders = spec.submodule_search_locations or () if spec else ()
    return tuple(file for folder in folders for file in sorted(Path(folder, "lib").glob("libcudnn.so.[0-9]*")))


def load_without_library() -> ModuleType | No:
    """The package without its library: graphs can be made, but not planned. Otherwise as ``load``."""
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
