"""The package ``cudnn`` and the library behind it: there, or the reason why not."""

import contextlib
import ctypes
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from graphfuse.engine import No

OLDEST = (1, 32)
"""Of nvidia-cudnn-frontend. Graphs are built in Python, with uids given when tensors are made."""


def load() -> ModuleType | No:
    """The imported package, or what is missing: the package, a version of it, or libcudnn."""
    package = load_without_library()
    if isinstance(package, No):
        return package
    try:
        package.backend_version()
    except (RuntimeError, OSError) as error:  # what its loader of libraries raises
        return _with_bundled(package, error)
    return package


def _with_bundled(package: ModuleType, error: Exception) -> ModuleType | No:
    """The package, given the library of a wheel that it does not look for: it knows one folder for wheels, and torch's
    may be in another, as where an environment sees the system's packages."""
    again = getattr(package, "_dlopen_cudnn", None)
    for library in bundled() if again else ():
        with contextlib.suppress(RuntimeError, OSError):  # the next one may do
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            again()  # which finds by name what is loaded
            package.backend_version()
            return package
    return No(f"nvidia-cudnn-frontend finds no libcudnn ({error}): install nvidia-cudnn-cu13, or cuDNN itself")


def bundled() -> tuple[Path, ...]:
    """libcudnn in wheels, wherever Python finds them: torch's builds for CUDA come with one."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ImportError:  # no package nvidia
        return ()
    folders = spec.submodule_search_locations or () if spec else ()
    return tuple(file for folder in folders for file in sorted(Path(folder, "lib").glob("libcudnn.so.[0-9]*")))


def load_without_library() -> ModuleType | No:
    """As ``load``, of which graphs can be made but not planned."""
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
