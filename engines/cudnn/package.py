"""The package ``cudnn`` and the library behind it: there, or the reason why not."""

import re
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
        return No(f"nvidia-cudnn-frontend finds no libcudnn ({error}): install nvidia-cudnn-cu13, or cuDNN itself")
    return package


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
