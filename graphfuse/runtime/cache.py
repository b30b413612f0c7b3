"""Compiled kernels, kept in this process and on disk. A hit loads no NVRTC.

A stored entry is the cubin followed by a trailer: a mark and the SHA-256 of key and
cubin. Tools that read the ELF file ignore what follows it, and anything truncated,
damaged or put under the wrong name is a miss. cuda.core's own keys are not used:
making one asks NVRTC for its version, which loads the library.
"""

import hashlib
import threading
import warnings
from collections import Counter
from dataclasses import dataclass

from graphfuse import settings
from graphfuse.runtime import nvrtc
from graphfuse.runtime.toolkit import Toolkit

_MARK = b"gfcubin\x01"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size

_kernels: dict[bytes, bytes] = {}
_key_locks: dict[bytes, threading.Lock] = {}
_lock = threading.Lock()  # guards the two tables and the counts, never held while compiling
_counts: Counter[str] = Counter()
_warned = False


@dataclass(frozen=True)
class Statistics:
    """How the kernels of this process came about so far."""

    compiled: int
    memory_hits: int
    disk_hits: int


def statistics() -> Statistics:
    """Counts since the process began."""
    with _lock:
        return Statistics(_counts["compiled"], _counts["memory_hits"], _counts["disk_hits"])


def key(source: str, arch: str, name: str, kit: Toolkit) -> bytes:
    """Digest of all that decides the bytes of a cubin."""
    options = sorted(nvrtc.OPTIONS.items())
    return hashlib.sha256(repr((1, source, arch, name, options, kit.fingerprint)).encode()).digest()


def cubin(source: str, arch: str, name: str) -> bytes:
    """The machine code of `source`: from memory, else from disk, else compiled and kept.

    Arguments and errors as of ``nvrtc.compile``. Threads that ask for one source at once
    compile it once. A cache directory that cannot be used costs a warning, no more.
    """
    digest = key(source, arch, name, nvrtc.needs(source))
    with _lock:
        found = _kernels.get(digest)
        if found is not None:
            _counts["memory_hits"] += 1
            return found
        key_lock = _key_locks.setdefault(digest, threading.Lock())
    with key_lock:
        # Where another thread was first, its result is in memory now.
        found, came = _kernels.get(digest), "memory_hits"
        if found is None:
            found, came = _read(digest), "disk_hits"
        if found is None:
            found, came = nvrtc.compile(source, arch, name), "compiled"
            # Loading may have passed over a broken NVRTC for another: store under what was used.
            _write(key(source, arch, name, nvrtc.needs(source)), found)
        with _lock:
            _kernels[digest] = found
            _counts[came] += 1
            _key_locks.pop(digest, None)
        return found


def _read(digest: bytes) -> bytes | None:
    try:
        stored = _store().get(digest)
    except OSError as error:
        _warn(error)
        return None
    if stored is None or len(stored) < _TRAILER:
        return None
    code, trailer = stored[:-_TRAILER], stored[-_TRAILER:]
    return code if trailer == _trailer(digest, code) else None


def _write(digest: bytes, code: bytes) -> None:
    try:
        _store()[digest] = code + _trailer(digest, code)
    except OSError as error:
        _warn(error)


def _trailer(digest: bytes, code: bytes) -> bytes:
    return _MARK + hashlib.sha256(digest + code).digest()


def _store():
    from graphfuse.runtime.cuda_core import FileStreamProgramCache

    return FileStreamProgramCache(settings.cache_dir() / "cubin")


def _warn(error: OSError) -> None:
    global _warned
    with _lock:
        first, _warned = not _warned, True
    if first:
        warnings.warn(
            f"compiled kernels are not kept: {settings.cache_dir()} cannot be used ({error}); "
            "set GRAPHFUSE_CACHE_DIR to a directory that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
