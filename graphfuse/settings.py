"""What users choose through the environment. The only module that reads it, and it does so at call time.

| variable | meaning |
| --- | --- |
| GRAPHFUSE_DEVICE | the device to plan for: cpu, cuda (the current one), cuda:N or emulator |
| GRAPHFUSE_CACHE_DIR | where compiled kernels are kept (default: graphfuse in XDG_CACHE_HOME or ~/.cache) |
| CXX | the C++ compiler that the emulator tries before g++ and clang++ |
| GIT_COMMIT | the commit that records name, for a copy without its history |
| CUDA_HOME, CUDA_PATH | CUDA toolkits to prefer over the pip wheels, in this order |
"""

import os
import re
from pathlib import Path

DEVICE = re.compile(r"cpu|emulator|cuda(?::(\d+))?")
"""How a device is written; group 1 is the ordinal."""


def device() -> str | None:
    """The device of GRAPHFUSE_DEVICE, None if unset or empty; ValueError for anything that is not a device."""
    value = os.environ.get("GRAPHFUSE_DEVICE")
    if not value:
        return None
    if not DEVICE.fullmatch(value):
        raise ValueError(f"GRAPHFUSE_DEVICE={value!r} is not a device; accepted: cpu, cuda, cuda:N, emulator")
    return value


def cache_dir() -> Path:
    """The directory for compiled kernels; it need not exist. ValueError for a relative GRAPHFUSE_CACHE_DIR."""
    value = os.environ.get("GRAPHFUSE_CACHE_DIR")
    if value:
        path = Path(os.path.expanduser(value))  # unlike Path's own, leaves the ~ of users that do not exist
        if not path.is_absolute():
            raise ValueError(f"GRAPHFUSE_CACHE_DIR={value!r} depends on the working directory; accepted: absolute path")
        return path
    # The XDG base directory specification has relative values ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "graphfuse"


def commit() -> str | None:
    """The commit of the sources, for a copy that came without their history."""
    return os.environ.get("GIT_COMMIT") or None


def toolkit_roots() -> tuple[tuple[str, Path], ...]:
    """(variable, directory) of the CUDA toolkits that the user names, preferred first."""
    named = ((name, os.environ.get(name)) for name in ("CUDA_HOME", "CUDA_PATH"))
    return tuple((name, Path(value)) for name, value in named if value)


def host_compilers() -> tuple[str, ...]:
    """C++ compilers for this machine, by name or path, preferred first."""
    return tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++")))
