"""Where compiled files are kept: a folder that only the user can write, of bounded size.

An entry ends in a SHA-256 of its name and content, which the loader and the linker ignore. An entry that is truncated,
damaged or under another name is a miss. So is one that another user owns or that others can write, because entries are
code that this process runs. Where all entries together exceed LIMIT bytes, those used longest ago are removed,
whatever process made them. A process that has loaded a removed entry keeps it.
"""

import contextlib
import errno
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from graphfuse import settings

LIMIT = 512 << 20
"""Bytes: a kernel's library is some 50 KB, its program with sanitizers some 500 KB."""

_SPARED = 600.0  # seconds: an entry found more recently may still be about to be loaded, and is not removed
_DIGEST = hashlib.sha256().digest_size

_given_up: set[Path] = set()
_warned: set[Path] = set()  # folders of which an entry was refused


@dataclass(frozen=True)
class Store:
    """A folder of entries. Any number of processes may use it at once."""

    folder: Path

    def find(self, name: str) -> Path | None:
        """The path of an entry, None if there is none that can be used."""
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                foreign = _foreign(os.fstat(file.fileno()))
                content = b"" if foreign else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(path, error.strerror)
            return None
        if foreign:
            self._refuse(path, foreign)
            return None
        if _trailer(name, content[:-_DIGEST]) != content[-_DIGEST:]:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def keep(self, name: str, content: bytes) -> Path:
        """The path of a new entry, which takes the place of one of that name. OSError where it cannot be written."""
        path = self.folder / name
        handle, scratch = tempfile.mkstemp(dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, stat.S_IRWXU)  # programs among them are started
                file.write(content + _trailer(name, content))
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
        self._make_room()
        return path

    def _make_room(self) -> None:
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process was faster
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    entries.append((found.st_mtime, found.st_size, path))
        excess = sum(size for _, size, _ in entries) - LIMIT
        for used, size, path in sorted(entries):
            if excess <= 0 or used > time.time() - _SPARED:
                break
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime == used:
                    path.unlink()
            excess -= size

    def _refuse(self, path: Path, why: str) -> None:
        if self.folder not in _warned:
            _warned.add(self.folder)
            text = f"{path} is not used ({why}), nor are others like it: they are compiled again"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def cache() -> Store | None:
    """The store in the cache directory; None, after a warning, where that cannot be used."""
    try:
        folder = settings.cache_dir() / "emulator"
        if folder in _given_up:
            return None
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        foreign = _foreign(folder.stat())
        if foreign:
            raise PermissionError(errno.EPERM, foreign, str(folder))
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        give_up(error)
        return None
    return Store(folder)


def give_up(error: OSError) -> None:
    """Leave the store in the cache directory alone for the rest of the process, with a warning."""
    try:
        folder = settings.cache_dir() / "emulator"
    except OSError:  # there is none
        folder = Path()
    if folder not in _given_up:
        _given_up.add(folder)
        warnings.warn(settings.cache_unusable(error), RuntimeWarning, stacklevel=2)


@functools.cache
def own() -> Store:
    """A store for this process, which is removed when it ends. OSError where there is no room for temporary files."""
    folder = tempfile.TemporaryDirectory(prefix="graphfuse-")
    _kept.append(folder)
    return Store(Path(folder.name))


_kept: list[tempfile.TemporaryDirectory] = []


def _foreign(found: os.stat_result) -> str | None:
    """Why a file or folder may hold what somebody else put there; None if nobody else can have."""
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write it"
    return None


def _trailer(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
