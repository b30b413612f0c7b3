"""The folder of compiled files, which only the user can write, and whose size is bounded.

An entry ends in a SHA-256 of its name and content, which the loader and the linker ignore. An entry that is truncated,
damaged or renamed is a miss. So is one that another user owns or that others can write, because the process runs
entries. If all entries together exceed `limit` bytes, the least recently used are removed. A process checks this at its
first new entry, and whenever it has added another `_SHARE` of the limit. Removed entries stay loaded.
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

from graphfuse.base import settings
from graphfuse.files.cache_file import CacheFile, files, foreign

LIMIT = 512 << 20
"""Default limit in bytes; GRAPHFUSE_CACHE_LIMIT sets another. A kernel's library has some 50 KB, one with
AddressSanitizer some 300 KB."""

_SPARED = 600.0  # seconds; an entry that was found more recently may not be loaded yet, so it is not removed
_DIGEST = hashlib.sha256().digest_size
# A process may exceed the limit by this part of it, as checking thousands of entries takes a tenth of a compilation.
_SHARE = 1 / 64

_given_up: set[Path] = set()
_warned: set[Path] = set()  # folders with a refused entry
_added: dict[Path, int] = {}  # bytes that this process has added to a folder since it last checked all entries


@dataclass(frozen=True)
class LibraryStore:
    """A folder of entries. Any number of processes may use it at once."""

    folder: Path

    def find(self, name: str) -> Path | None:
        """The path of a usable entry; None if there is none."""
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                why = foreign(os.fstat(file.fileno()))
                content = b"" if why else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(path, error.strerror)
            return None
        if why:
            self._refuse(path, why)
            return None
        if not _sound(name, content):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def keep(self, name: str, content: bytes) -> Path:
        """Store an entry, replacing one of this name. Returns its path. Raises OSError if it cannot be written."""
        path = self.folder / name
        handle, scratch = tempfile.mkstemp(dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, stat.S_IRWXU)  # executable, as some entries are programs
                file.write(content + _trailer(name, content))
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
        added = _added.get(self.folder, limit()) + len(content)
        if added >= limit() * _SHARE:
            self._make_room()
            added = 0
        _added[self.folder] = added
        return path

    def _make_room(self) -> None:
        entries = files(self.folder.iterdir(), _used)
        excess = sum(entry.size for entry in entries) - limit()
        for entry in sorted(entries, key=lambda e: e.used):
            if excess <= 0 or entry.used > time.time() - _SPARED:
                break
            with contextlib.suppress(OSError):
                if entry.path.lstat().st_mtime == entry.used:
                    entry.path.unlink()
            excess -= entry.size

    def _refuse(self, path: Path, why: str) -> None:
        if self.folder not in _warned:
            _warned.add(self.folder)
            text = f"{path} is not used ({why}), nor are others like it: they are compiled again"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def folder() -> Path:
    """Folder of the store in the cache directory. Errors as in ``settings.cache_dir``."""
    return settings.cache_dir() / "emulator"


def limit() -> int:
    """Maximum number of bytes of a store."""
    return settings.cache_limit(LIMIT)


def kept() -> list[CacheFile]:
    """The entries of the store in the cache directory."""
    place = folder()
    return files(place.iterdir(), _used) if place.is_dir() else []


def damage(path: Path) -> str | None:
    """Why an entry is a miss; None if it is usable or being written."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if why := foreign(found):
            return why
        if path.name.startswith(tempfile.gettempprefix()):
            return None if _used(found) > time.time() - _SPARED else "a process that died left it"
        return None if _sound(path.name, file.read()) else "it is damaged, or another kernel's"


def cache() -> LibraryStore | None:
    """The store in the cache directory; None, after a warning, if that cannot be used."""
    try:
        place = folder()
        if place in _given_up:
            return None
        place.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        if why := foreign(place.stat()):
            raise PermissionError(errno.EPERM, why, str(place))
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        give_up(error)
        return None
    return LibraryStore(place)


def give_up(error: OSError) -> None:
    """Do not use the cache directory for the rest of the process, with a warning."""
    try:
        place = folder()
    except OSError:  # there is none
        place = Path()
    if place not in _given_up:
        _given_up.add(place)
        warnings.warn(settings.cache_unusable(error), RuntimeWarning, stacklevel=2)


@functools.cache
def own() -> LibraryStore:
    """A store for this process, removed when it ends. Raises OSError if no temporary directory can be made."""
    made = tempfile.TemporaryDirectory(prefix="graphfuse-")
    _kept.append(made)
    return LibraryStore(Path(made.name))


_kept: list[tempfile.TemporaryDirectory] = []


def _used(found: os.stat_result) -> float:
    return found.st_mtime


def _sound(name: str, content: bytes) -> bool:
    return _trailer(name, content[:-_DIGEST]) == content[-_DIGEST:]


def _trailer(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
