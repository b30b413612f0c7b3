"""What graphfuse keeps on disk, by kind: the place, the entries, and their faults."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.errors import GraphfuseError
from graphfuse.kept_file import KeptFile


@dataclass(frozen=True)
class Kind:
    """One kind of what is kept.

    folder, files: errors as of ``settings.cache_dir``. damage: why a file is of no use, None if it is of use; OSError
    where it cannot be read. mend: drop what is of no use, and the file where nothing else is in it. limit: bytes,
    None where there is none. lasting: took more than a compiler to make.
    """

    name: str
    holds: str
    folder: Callable[[], Path]
    files: Callable[[], list[KeptFile]]
    damage: Callable[[Path], str | None]
    mend: Callable[[Path], None]
    limit: Callable[[], int | None]
    lasting: bool = False


def kinds() -> dict[str, Kind]:
    from graphfuse import settings
    from graphfuse.emulator import store as emulator
    from graphfuse.runtime import cache as cubins
    from graphfuse.tables import store as tables

    made = (
        Kind("cubins", "kernels for GPUs", cubins.folder, cubins.kept, cubins.damage, Path.unlink, cubins.limit),
        Kind(
            "emulator",
            "kernels for the emulator",
            emulator.folder,
            emulator.kept,
            emulator.damage,
            Path.unlink,
            emulator.limit,
        ),
        Kind(
            "tuned",
            "tuned knobs",
            settings.tuning_dir,
            tables.kept,
            tables.damage,
            tables.drop_damage,
            lambda: None,
            lasting=True,
        ),
    )
    return {kind.name: kind for kind in made}


def damaged(kind: Kind, files: Sequence[KeptFile]) -> list[tuple[Path, str]]:
    """Those of its files that are of no use, and why. What another process removes meanwhile is left out."""
    found = []
    for file in files:
        try:
            why = kind.damage(file.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            why = f"it cannot be read: {error.strerror}"
        if why is not None:
            found.append((file.path, why))
    return found


def summary(kind: Kind) -> dict[str, Any]:
    """What there is, as JSON values; what is wrong with the folder or a setting stands under "error"."""
    try:
        files = kind.files()
        found = {"name": kind.name, "holds": kind.holds, "folder": str(kind.folder()), "limit": kind.limit()}
    except (OSError, GraphfuseError) as error:
        return {"name": kind.name, "holds": kind.holds, "error": str(error)}
    return {**found, "files": len(files), "bytes": sum(f.size for f in files)}


def listed(files: Sequence[KeptFile]) -> list[dict[str, Any]]:
    """What was used last comes first. used: in ISO 8601, UTC."""
    return [
        {"path": str(f.path), "bytes": f.size, "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(f.used))}
        for f in sorted(files, key=lambda f: -f.used)
    ]
