"""Caches of compiled kernels, in this process and on disk. A hit does not load NVRTC.

A stored entry is the cubin and a trailer: a mark, the key, and the SHA-256 of key and cubin. Tools that read the ELF
file ignore the trailer. An entry that is truncated, damaged or renamed is a miss. With the key, an entry can be checked
without its source. cuda.core's own keys are not used, as making one loads NVRTC to get its version.

The sizes of both caches are bounded. The least recently used entries are removed first.
"""

import hashlib
import threading
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path

from graphfuse.base import settings
from graphfuse.files.cache_file import CacheFile, files
from graphfuse.runtime import nvrtc
from graphfuse.runtime.toolkit import Toolkit

_MARK = b"gfcubin\x02"
_DIGEST = hashlib.sha256().digest_size
_TRAILER = len(_MARK) + 2 * _DIGEST

KEPT_KERNELS = 1024
"""Maximum number of cubins in memory, the same as that of loaded kernels. A cubin has some 30 KB."""

KEPT_BYTES = 256 << 20
"""Default limit of bytes on disk; GRAPHFUSE_CACHE_LIMIT sets another."""

_kernels: OrderedDict[bytes, bytes] = OrderedDict()  # the most recently used one is last
_key_locks: dict[bytes, threading.Lock] = {}
_lock = threading.Lock()  # guards the two tables and the counts, never held while compiling
_counts: Counter[str] = Counter()
_warned = False


@dataclass(frozen=True)
class Statistics:
    """Numbers of kernels that this process compiled, and found in memory and on disk."""

    compiled: int
    memory_hits: int
    disk_hits: int


def statistics() -> Statistics:
    """Numbers since the process began."""
    with _lock:
        return Statistics(_counts["compiled"], _counts["memory_hits"], _counts["disk_hits"])


def folder() -> Path:
    """Folder of the cubins. Errors as in ``settings.cache_dir``."""
    return settings.cache_dir() / "cubin"


def limit() -> int:
    """Maximum number of bytes of cubins on disk."""
    return settings.cache_limit(KEPT_BYTES)


def kept() -> list[CacheFile]:
    """The entries on disk, in the folders that cuda.core makes. It sets the access time of each entry that it reads."""
    return files((folder() / "entries").glob("*/*"), lambda found: found.st_atime)


def damage(path: Path) -> str | None:
    """Why an entry is a miss; None if it is usable."""
    stored = path.read_bytes()
    code, trailer = stored[:-_TRAILER], stored[-_TRAILER:]
    if len(trailer) < _TRAILER or not trailer.startswith(_MARK):
        return "it is truncated"
    digest = trailer[len(_MARK) : -_DIGEST]
    if trailer != _trailer(digest, code):
        return "it is damaged"
    name = hashlib.sha256(digest).hexdigest()
    return None if path.parts[-2:] == (name[:2], name[2:]) else "it is another kernel's"


def key(source: str, arch: str, name: str, kit: Toolkit) -> bytes:
    """Digest of everything that the bytes of a cubin depend on."""
    options = sorted(nvrtc.OPTIONS.items())
    return hashlib.sha256(repr((1, source, arch, name, options, kit.fingerprint)).encode()).digest()


def cubin(source: str, arch: str, name: str) -> bytes:
    """The machine code of `source`: from memory, else from disk, else compiled and stored.

    Arguments and errors are as in ``nvrtc.compile``. Threads that request the same source compile it once. If the cache
    directory cannot be used, there is a warning.
    """
    digest = key(source, arch, name, nvrtc.needs(source))
    with _lock:
        key_lock = _key_locks.setdefault(digest, threading.Lock())
    try:
        with key_lock:  # if another thread compiled it meanwhile, its result is in memory now
            found, came = _kernels.get(digest), "memory_hits"
            if found is None:
                found, came = _read(digest), "disk_hits"
            if found is None:
                found, came = nvrtc.compile(source, arch, name), "compiled"
                # Loading may have skipped a broken NVRTC, so the key may be another one now.
                _write(key(source, arch, name, nvrtc.needs(source)), found)
            with _lock:
                _kernels[digest] = found
                _kernels.move_to_end(digest)
                while len(_kernels) > KEPT_KERNELS:
                    _kernels.popitem(last=False)
                _counts[came] += 1
            return found
    finally:
        with _lock:
            _key_locks.pop(digest, None)


def _read(digest: bytes) -> bytes | None:
    try:
        # Without a limit, as a store with one reads the size of every entry when it is opened.
        stored = _store(None).get(digest)
    except OSError as error:
        _warn(error)
        return None
    if stored is None or len(stored) < _TRAILER:
        return None
    code, trailer = stored[:-_TRAILER], stored[-_TRAILER:]
    return code if trailer == _trailer(digest, code) else None


def _write(digest: bytes, code: bytes) -> None:
    try:
        _store(limit())[digest] = code + _trailer(digest, code)
    except OSError as error:
        _warn(error)


def _trailer(digest: bytes, code: bytes) -> bytes:
    return _MARK + digest + hashlib.sha256(digest + code).digest()


def _store(limit: int | None):
    from graphfuse.runtime.cuda_core import FileStreamProgramCache

    return FileStreamProgramCache(folder(), max_size_bytes=limit)


def _warn(error: OSError) -> None:
    global _warned
    with _lock:
        first, _warned = not _warned, True
    if first:
        warnings.warn(settings.cache_unusable(error), RuntimeWarning, stacklevel=2)
