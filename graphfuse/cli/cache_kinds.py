"""Kinds of files that graphfuse keeps on disk: their folder, files and faults."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.base.errors import GraphfuseError
from graphfuse.files.cache_file import CacheFile


@dataclass(frozen=True)
class CacheKind:
    """One kind of kept files.

    folder, files: raise the errors of ``settings.cache_dir``.
    damage: the reason why a file is not usable, None if it is. Raises OSError if it cannot be read.
    limit: in bytes, None if there is none.
    mend: drops unusable entries, and the file if it has no others.
    lasting: whether it holds more than compilation results.
    """

    name: str
    holds: str
    folder: Callable[[], Path]
    files: Callable[[], list[CacheFile]]
    damage: Callable[[Path], str | None]
    limit: Callable[[], int | None] = lambda: None
    mend: Callable[[Path], None] = Path.unlink
    lasting: bool = False

    def damaged(self, files: Sequence[CacheFile]) -> list[tuple[Path, str]]:
        """Files that are not usable, with the reasons. Files that another process removes meanwhile are skipped."""
        found = []
        for file in files:
            try:
                why = self.damage(file.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                why = f"it cannot be read: {error.strerror}"
            found += [(file.path, why)] if why is not None else []
        return found


def kinds() -> dict[str, CacheKind]:
    from graphfuse.base import settings
    from graphfuse.emulator import store as libraries
    from graphfuse.runtime import cache as cubins
    from graphfuse.tuned_tables import store as tables

    gpu, cpu = (
        CacheKind(name, f"kernels for {what}", of.folder, of.kept, of.damage, of.limit)
        for name, what, of in (("cubins", "GPUs", cubins), ("emulator", "the emulator", libraries))
    )
    folder, mend = settings.tuning_dir, tables.drop_damage
    tuned = CacheKind("tuned", "tuned knobs", folder, tables.kept, tables.damage, mend=mend, lasting=True)
    return {kind.name: kind for kind in (gpu, cpu, tuned)}


def summary(kind: CacheKind, entries: bool = False) -> dict[str, Any]:
    """Contents of a cache as JSON values. entries: whether to list each file, the most recently used first. The fault
    of a folder or a setting is under "error"."""
    try:
        files = kind.files()
        found = {"name": kind.name, "holds": kind.holds, "folder": str(kind.folder()), "limit": kind.limit()}
    except (OSError, GraphfuseError) as error:
        return {"name": kind.name, "holds": kind.holds, "error": str(error)}
    found |= {"files": len(files), "bytes": sum(f.size for f in files)}
    if entries:
        found["entries"] = [
            {"path": str(f.path), "bytes": f.size, "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(f.used))}
            for f in sorted(files, key=lambda f: -f.used)
        ]
    return found
