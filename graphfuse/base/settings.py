"""Settings that users give by environment variables. No other module reads these; they are read at call time.

| variable | meaning |
| --- | --- |
| GRAPHFUSE_DEVICE | the device to plan for: cpu, cuda (the current one), cuda:N; emulator, also for CPU tensors |
| GRAPHFUSE_CACHE_DIR | where compiled kernels are kept (default: graphfuse in XDG_CACHE_HOME or ~/.cache) |
| GRAPHFUSE_CACHE_LIMIT | bytes that the kernels kept for GPUs may take, and those for the emulator: 500M, 2G |
| GRAPHFUSE_TUNING_DIR | where tuned knobs are kept (default: graphfuse/tuning in XDG_DATA_HOME or ~/.local/share) |
| GRAPHFUSE_PLUGINS | off: patterns and engines of installed packages are not loaded; on (default) |
| GRAPHFUSE_VERIFY | on: row programs and phase plans are checked, for authors; off (default) |
| GRAPHFUSE_RANKS_TIMEOUT | seconds that a call may wait for other ranks, checked after each call; unset: any |
| GRAPHFUSE_CUDNN | off: cuDNN (extra cudnn) runs only if named; on: it may run all nodes that it supports |
| CXX | the C++ compiler that the emulator tries before g++ and clang++ |
| GIT_COMMIT | the commit that records name, for a copy without its history |
| CUDA_HOME, CUDA_PATH | CUDA toolkits to prefer over the pip wheels, in this order |
"""

import math
import os
import re
from pathlib import Path

from graphfuse.base.errors import HomeNotFoundError, SettingError

DEVICE = re.compile(r"cpu|emulator|cuda(?::(\d+))?")
"""Syntax of a device; group 1 is the ordinal."""

VARIABLES = (
    "GRAPHFUSE_DEVICE",
    "GRAPHFUSE_CACHE_DIR",
    "GRAPHFUSE_CACHE_LIMIT",
    "GRAPHFUSE_CUDNN",
    "GRAPHFUSE_PLUGINS",
    "GRAPHFUSE_RANKS_TIMEOUT",
    "GRAPHFUSE_TUNING_DIR",
    "GRAPHFUSE_VERIFY",
    "CXX",
    "GIT_COMMIT",
    "CUDA_HOME",
    "CUDA_PATH",
)
"""All variables that are read, except XDG_CACHE_HOME and XDG_DATA_HOME."""

_SIZE = re.compile(r"(\d+)([KMG]?)")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}

_tuning_dir: Path | None = None


def given() -> dict[str, str]:
    """The variables that are set, with their values."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def device() -> str | None:
    """The device of GRAPHFUSE_DEVICE; None if unset or empty. Raises SettingError if it is not a device."""
    value = os.environ.get("GRAPHFUSE_DEVICE")
    if not value:
        return None
    if not DEVICE.fullmatch(value):
        raise SettingError(f"GRAPHFUSE_DEVICE={value!r} is not a device; accepted: cpu, cuda, cuda:N, emulator")
    return value


def plugins() -> bool:
    """True if patterns and engines of installed packages are used. Raises SettingError unless it is on or off."""
    return _switch("GRAPHFUSE_PLUGINS", "on")


def cudnn() -> bool | None:
    """True if cuDNN may run all nodes that it supports, False if none; None (unset) if those that no engine of
    graphfuse's own runs. Raises SettingError unless the value is on or off."""
    return _switch("GRAPHFUSE_CUDNN", "on") if os.environ.get("GRAPHFUSE_CUDNN") else None


def verify() -> bool:
    """True if row programs and phase plans are checked. Raises SettingError unless the value is on or off."""
    return _switch("GRAPHFUSE_VERIFY", "off")


def ranks_timeout() -> float | None:
    """The seconds of GRAPHFUSE_RANKS_TIMEOUT; None if unset or empty. Raises SettingError unless it is above 0."""
    value = os.environ.get("GRAPHFUSE_RANKS_TIMEOUT")
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise SettingError(f"GRAPHFUSE_RANKS_TIMEOUT={value!r} is not known; accepted: seconds, a number above 0")
    return seconds


def cache_dir() -> Path:
    """The directory for compiled kernels; it need not exist. Raises SettingError for a relative GRAPHFUSE_CACHE_DIR,
    HomeNotFoundError if there is no default."""
    return _directory("GRAPHFUSE_CACHE_DIR") or _base("XDG_CACHE_HOME", ".cache", "GRAPHFUSE_CACHE_DIR") / "graphfuse"


def cache_limit(default: int) -> int:
    """The bytes of GRAPHFUSE_CACHE_LIMIT; `default` if unset or empty. Raises SettingError unless it is above 0."""
    value = os.environ.get("GRAPHFUSE_CACHE_LIMIT")
    if not value:
        return default
    match = _SIZE.fullmatch(value)
    size = int(match[1]) << _UNITS[match[2]] if match else 0
    if not size:
        raise SettingError(
            f"GRAPHFUSE_CACHE_LIMIT={value!r} is no size; accepted: a number of bytes above 0, or one with K, M or G, "
            "as 500M"
        )
    return size


def cache_unusable(error: OSError) -> str:
    """Message for users that compiled kernels cannot be kept in `cache_dir`."""
    if isinstance(error, HomeNotFoundError):
        return f"compiled kernels are not kept: {error}"
    return (
        f"compiled kernels are not kept: {cache_dir()} cannot be used ({error}); "
        "set GRAPHFUSE_CACHE_DIR to a directory of your own that can be written"
    )


def tuning_dir() -> Path:
    """The directory for tuned knobs; it need not exist. Raises SettingError for a relative GRAPHFUSE_TUNING_DIR,
    HomeNotFoundError if there is no default."""
    named = _tuning_dir or _directory("GRAPHFUSE_TUNING_DIR")
    return named or _base("XDG_DATA_HOME", ".local/share", "GRAPHFUSE_TUNING_DIR") / "graphfuse" / "tuning"


def use_tuning_dir(directory: Path | None) -> None:
    """Sets the directory for tuned knobs of this process. None: that of the environment."""
    global _tuning_dir
    _tuning_dir = directory


def environment(**changes: str) -> dict[str, str]:
    """The environment for a new process, with these variables set."""
    return {**os.environ, **changes}


def _switch(name: str, default: str) -> bool:
    value = os.environ.get(name) or default
    if value not in ("on", "off"):
        raise SettingError(f"{name}={value!r} is not known; accepted: on, off")
    return value == "on"


def _directory(name: str) -> Path | None:
    value = os.environ.get(name)
    if not value:
        return None
    path = Path(os.path.expanduser(value))  # unlike Path.expanduser, leaves the ~ of users that do not exist
    if not path.is_absolute():
        raise SettingError(f"{name}={value!r} depends on the working directory; accepted: absolute path")
    return path


def _base(name: str, otherwise: str, ours: str) -> Path:
    # The XDG base directory specification says to ignore relative values.
    base = Path(os.environ.get(name) or "")
    if base.is_absolute():
        return base
    try:
        return Path.home() / otherwise
    except RuntimeError:  # such as a container's user without an entry in passwd
        raise HomeNotFoundError(f"the user has no home directory for ~/{otherwise}; set {ours} or {name}") from None


def commit() -> str | None:
    """The commit of the sources, for a copy without their history."""
    return os.environ.get("GIT_COMMIT") or None


def toolkit_roots() -> tuple[tuple[str, Path], ...]:
    """(variable, directory) of the CUDA toolkits that the user names, preferred first."""
    named = ((name, os.environ.get(name)) for name in ("CUDA_HOME", "CUDA_PATH"))
    return tuple((name, Path(value)) for name, value in named if value)


def host_compilers() -> tuple[str, ...]:
    """C++ compilers for this machine, by name or path, preferred first."""
    return tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++")))
