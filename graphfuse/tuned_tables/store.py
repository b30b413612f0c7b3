"""The files of tuned knobs: tables next to the engines' modules, and the user's own, one file per device.

A file is JSON: {"version", "sources": [...], "problems": [{"engine", "key", "entries": [...]}]}. Each entry has the
number of its source. An invalid entry of a user's file is skipped, with one warning. In an engine's table it raises
PluginError.
"""

import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from graphfuse.base import settings
from graphfuse.base.device import Device
from graphfuse.base.errors import HomeNotFoundError, PluginError
from graphfuse.contract.engine import Engine
from graphfuse.files.cache_file import CacheFile, files
from graphfuse.tuned_tables.entry import Source, TunedEntry
from graphfuse.tuned_tables.tunings import Tunings, arch

VERSION = 2
"""Version of the file format and of the engines' problem keys. Files of another version are not used."""

generation = 0
"""Number that increases when tuned knobs change: by this process, or in a file that another process changed. Plans of
an earlier generation may be outdated."""

_read: dict[Path, tuple[tuple[int, int, int] | None, tuple[TunedEntry, ...]]] = {}
_warned: set[Path] = set()
_PROBLEM = ("engine", "key", "entries")
_lock = threading.Lock()  # guards `generation`, `_read` and `_warned`


class _OtherVersion(ValueError):
    """Error for a file of another version of this library, whose content is unknown."""

    def __init__(self, version: object):
        super().__init__(
            f"it is of version {version!r}, which is not used; this is version {VERSION}: tune again, by `graphfuse "
            "tune` or graph.autotune()"
        )


def tunings(engines: Iterable[Engine], device: Device) -> Tunings:
    """Tuned entries for `engines` on `device`, the user's and the first-party ones."""
    tuned = [e for e in engines if type(e).problem is not Engine.problem]
    if not tuned or not device.runs_kernels:
        return Tunings()
    return Tunings(_own(device), tuple(e for engine in tuned for e in first_party(engine, device)))


def _own(device: Device) -> tuple[TunedEntry, ...]:
    try:
        file = user_file(device)
    except HomeNotFoundError:  # without a home folder there is no user's file
        return ()
    entries = read(file)
    if not entries:
        _warn_of_others(file)
    own = tuple(e for e in entries if e.source.device == device.name)
    if len(own) < len(entries):
        _warn(file, "some of its entries are another device's")
    return own


def first_party(engine: Engine, device: Device) -> tuple[TunedEntry, ...]:
    """Entries of the table that comes with an engine: NAME.ARCH.json next to its module; empty if there is none."""
    return _beside(type(engine).__module__.rpartition(".")[0], engine.name, arch(device))


def user_file(device: Device) -> Path:
    """Path of the file with the user's tuned knobs for devices of this name."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return settings.tuning_dir() / f"{name or 'device'}.v{VERSION}.json"


def read(path: Path) -> tuple[TunedEntry, ...]:
    """Entries of a user's file, () if there is none. The file is read again only when it has changed."""
    try:
        state = _state(path)
        with _lock:
            known = _read.get(path)
        if known and known[0] == state:
            return known[1]
        entries, faults = _parse(path.read_bytes())
        if faults:
            _warn(path, f"{len(faults)} of its entries cannot be used; the first: {faults[0]}")
    except FileNotFoundError:
        state, entries = None, ()
    except (OSError, ValueError, RecursionError) as error:
        _warn(path, str(error))
        return ()
    with _lock:
        if path in _read and _read[path][0] != state:
            _changed()
        _read[path] = (state, entries)
    return entries


def kept() -> list[CacheFile]:
    """The user's files. Errors as in ``settings.tuning_dir``."""
    return files(settings.tuning_dir().glob("*.json"), lambda found: found.st_mtime)


def damage(path: Path) -> str | None:
    """Fault of a user's file, or of the first of its invalid entries; None if there is none.

    A file of another version of this library counts as sound, as that version uses it."""
    try:
        _, faults = _parse(path.read_bytes())
    except _OtherVersion:
        return None
    except (ValueError, RecursionError) as error:
        return str(error)
    return f"{len(faults)} of its entries cannot be used; the first: {faults[0]}" if faults else None


def add(path: Path, entries: Sequence[TunedEntry]) -> bool:
    """Add entries to a file, replacing those for the same problem classes. Returns True if they were stored.

    Processes that add at the same time lose no entries. A file of another version is not changed. If the entries
    cannot be stored, there is a warning.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            kept = [e for e in _before(path) if not any(e.same_class(new) for new in entries)]
            _replace(path, to_text([*kept, *entries]))
        with _lock:
            _changed()
        return True
    except (OSError, _OtherVersion) as error:
        _warn(path, f"{error}; nothing was added to it")
        return False


def drop_damage(path: Path) -> None:
    """Remove invalid entries from a user's file, and the file itself if no valid entry remains."""
    with _alone(path):
        try:
            entries, _ = _parse(path.read_bytes())
        except (ValueError, RecursionError):
            entries = ()
        if entries:
            _replace(path, to_text(entries))
        else:
            path.unlink(missing_ok=True)
    with _lock:
        _changed()


def to_text(entries: Sequence[TunedEntry]) -> str:
    """Text of a file with one line per entry, in an order that does not depend on when they were added."""
    sources = sorted({_key(s): s for s in (e.source.to_json() for e in entries)}.values(), key=_key)
    number = {_key(source): i for i, source in enumerate(sources)}
    problems: dict[tuple[str, str], list[TunedEntry]] = {}
    for entry in sorted(entries, key=lambda e: (e.engine, _key(e.key), e.rows)):
        problems.setdefault((entry.engine, _key(entry.key)), []).append(entry)
    values = []
    for of in problems.values():
        lines = ({"source": number[_key(e.source.to_json())], **e.to_json()} for e in of)
        text = ",\n".join(f"   {json.dumps(line)}" for line in lines)
        named = f'"engine": {json.dumps(of[0].engine)}, "key": {json.dumps(of[0].key)}'
        values.append(f'  {{{named}, "entries": [\n{text}]}}')
    lists = (",\n".join(lines) for lines in ([f"  {json.dumps(source)}" for source in sources], values))
    return '{{"version": {},\n "sources": [\n{}],\n "problems": [\n{}]}}\n'.format(VERSION, *lists)


def parse(text: bytes) -> tuple[TunedEntry, ...]:
    """Entries of a file. Raises ValueError, which says what is wrong, if any entry is invalid."""
    entries, faults = _parse(text)
    if faults:
        raise ValueError(faults[0])
    return entries


@functools.cache
def _beside(package: str, name: str, chip: str) -> tuple[TunedEntry, ...]:
    if not package or package not in sys.modules:
        return ()
    file = resources.files(package) / f"{name}.{chip}.json"
    if not file.is_file():
        return ()
    try:
        return parse(file.read_bytes())
    except ValueError as error:
        raise PluginError(f"table {file.name} of {package}: {error}") from error


def _parse(text: bytes) -> tuple[tuple[TunedEntry, ...], list[str]]:
    """Valid entries, and the faults of invalid ones. Raises ValueError if the text is no file of tuned knobs."""
    content = json.loads(text)
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError("it is no file of tuned knobs")
    if content["version"] != VERSION:
        raise _OtherVersion(content["version"])
    sources, problems = content.get("sources"), content.get("problems")
    if not isinstance(sources, list) or not isinstance(problems, list):
        raise ValueError("it has no lists of sources and problems")
    known = functools.cache(lambda number: Source.parse(sources[number]))
    entries, faults = [], []
    for problem in problems:
        engine, key, values = ((problem.get(n) if isinstance(problem, dict) else None) for n in _PROBLEM)
        if not isinstance(engine, str) or not isinstance(key, dict) or not isinstance(values, list):
            faults.append(f"a problem is {problem!r:.80}; accepted: an object of {', '.join(_PROBLEM)}")
            continue
        for value in values:
            try:
                number = value.pop("source", None) if type(value) is dict else None
                if type(number) is not int or not 0 <= number < len(sources):
                    raise ValueError(f"source is {number!r}; accepted: 0 to {len(sources) - 1}")
                entries.append(TunedEntry.parse(value, known(number), engine, key))
            except ValueError as error:
                faults.append(str(error))
    return tuple(entries), faults


def _before(path: Path) -> tuple[TunedEntry, ...]:
    """Entries of a file that is to be rewritten. Damage is ignored with a warning; another version raises."""
    try:
        return _parse(path.read_bytes())[0]
    except FileNotFoundError:
        return ()
    except _OtherVersion:
        raise
    except (ValueError, RecursionError) as error:
        _warn(path, str(error))
        return ()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Locks a file, so that one process at a time changes it. The lock is a second file, as the file is replaced."""
    import fcntl

    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also if the process dies
        yield


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _changed() -> None:
    global generation
    generation += 1


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _warn_of_others(file: Path) -> None:
    """Warns of files of other versions for the same device."""
    name, _, _ = file.name.rpartition(f".v{VERSION}.json")
    for other in sorted(file.parent.glob(f"{name}.v*.json")):
        if other != file:
            read(other)


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _warn(path: Path, why: str) -> None:
    with _lock:
        first = path not in _warned
        _warned.add(path)
    if first:
        warnings.warn(f"tuned knobs in {path}: {why}", RuntimeWarning, stacklevel=3)
