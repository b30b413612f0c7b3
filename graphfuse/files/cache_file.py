"""A file of an on-disk cache, and whether another user may have written it."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CacheFile:
    """A file of a cache. size: in bytes. used: time of the last use, in seconds since the epoch."""

    path: Path
    size: int
    used: float


def files(paths: Iterable[Path], used: Callable[[os.stat_result], float]) -> list[CacheFile]:
    """The regular files among `paths` that still exist: other processes may remove some at any time."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            state = path.lstat()
            if stat.S_ISREG(state.st_mode):
                found.append(CacheFile(path, state.st_size, used(state)))
    return found


def foreign(found: os.stat_result) -> str | None:
    """Reason why another user may have written a file or folder; None if no other user can."""
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write it"
    return None
