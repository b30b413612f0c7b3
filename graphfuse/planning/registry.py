"""The registry of patterns and engines: the caller's, the first-party ones, and those of installed packages.

Some first-party engines call libraries (``graphfuse.engines.LIBRARIES``). A setting turns them off, and with them the
patterns that only they use.

A package offers plug-ins by entry points in the groups ``graphfuse.engines`` and ``graphfuse.patterns``. Each names an
Engine or Pattern object, or a tuple of them. Importing a module registers nothing.

A faulty installed plug-in is not used, and there is a warning. `listed` has the state of each.
"""

import functools
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from graphfuse.base import settings
from graphfuse.base.errors import GraphTypeError, GraphValidationError, PluginError
from graphfuse.contract.engine import Engine
from graphfuse.contract.match import Pattern
from graphfuse.contract.served import Served

LOADED, LEFT_OUT, OFF = "loaded", "left out", "off"
"""States of an installed plug-in. Off: GRAPHFUSE_PLUGINS turns plug-ins off, so it was not loaded."""


@dataclass(frozen=True)
class Origin:
    """The distribution that a pattern or engine was installed with."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


FIRST_PARTY = Origin("graphfuse", "")


@dataclass(frozen=True)
class Listed:
    """An installed plug-in and its state. kind: "pattern" or "engine". name: its own, or its entry point's if it was
    not loaded. state: LOADED, LEFT_OUT or OFF. error: why it was left out."""

    kind: str
    name: str
    distribution: str
    version: str
    state: str
    error: str | None = None


@dataclass(frozen=True)
class Registry:
    """Patterns and engines that planning may use, in order of preference. origins: of those that the caller did not
    pass, by id. listed: the installed plug-ins. last: names of engines that are queried only for nodes that no engine
    of another pattern accepts. off: names of engines that the environment turns off."""

    patterns: tuple[Pattern, ...]
    engines: tuple[Engine, ...]
    origins: Mapping[int, Origin] = field(default_factory=dict, compare=False, repr=False)
    listed: tuple[Listed, ...] = field(default=(), compare=False, repr=False)
    last: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    off: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


def registry(patterns: Iterable[object] = (), engines: Iterable[object] = ()) -> Registry:
    """The registry for one graph. Objects given here come first. If names are given, only these and the objects are
    kept. An object that is also installed counts once, as the caller's."""
    from graphfuse.engines import ALL

    known = installed()
    patterns, engines = tuple(patterns), tuple(engines)
    used = _select(_ENGINES, known, known.engines, engines, ALL)
    found = _select(_PATTERNS, known, tuple(dict.fromkeys((*known.patterns, *_patterns_of(used)))), patterns)
    given = {id(item) for item in (*patterns, *engines)}
    named = {engine if isinstance(engine, str) else engine.name for engine in engines}
    origins = {i: o for i, o in known.origins.items() if i not in given}
    off = frozenset() if any(isinstance(engine, str) for engine in engines) else known.off - named
    return Registry(found, used, origins, known.listed, known.last - named, off)


def installed() -> Registry:
    """First-party patterns and engines, then those of installed packages by entry-point name.

    Faulty plug-ins raise no error. Raises SettingError for an invalid setting, such as of GRAPHFUSE_PLUGINS."""
    return _installed(settings.plugins(), settings.cudnn())


def _patterns_of(engines: Iterable[Engine]) -> tuple[Pattern, ...]:
    """The first-party patterns that only these engines use."""
    from graphfuse.patterns import OF_ENGINES

    return tuple(pattern for engine in engines for pattern in OF_ENGINES.get(engine.name, ()))


def listed() -> tuple[Listed, ...]:
    """The installed plug-ins and their states, in order of preference."""
    return installed().listed


def left_out() -> list[str]:
    """Why each faulty installed plug-in was left out, a line each."""
    return [one.error or one.name for one in listed() if one.state == LEFT_OUT]


def origin(item: object) -> Origin | None:
    """Origin of an installed pattern or engine; None for any other, and for all before the first are loaded."""
    return _origins.get(id(item))


def error_text(error: BaseException) -> str:
    """An exception as text on one line: its class and message."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


def safe_repr(value: object) -> str:
    """A value of a plug-in as text, even if its repr raises."""
    try:
        return repr(value)
    except (Exception, SystemExit):
        return object.__repr__(value)


def forget() -> None:
    """Clear the caches, so that installed packages are read again at the next use."""
    _installed.cache_clear()
    _origins.clear()


@dataclass(frozen=True, eq=False)
class _Kind:
    """One of the two kinds of plug-ins. of: its class. fields: types of each attribute that planning reads outside of
    guarded calls."""

    name: str
    of: type
    group: str
    fields: Mapping[str, tuple[type, ...]]

    def fault(self, item: object) -> str | None:
        """Fault of a pattern's or engine's attributes; None if there is none."""
        for name, accepted in self.fields.items():
            try:
                value = getattr(item, name, None)
            except (Exception, SystemExit) as error:
                return f"its {name} cannot be read: {error_text(error)}"
            if not isinstance(value, accepted) or value == "":
                return f"its {name} is {safe_repr(value)}; accepted: {' or '.join(kind.__name__ for kind in accepted)}"
        return None


_PATTERNS = _Kind("pattern", Pattern, "graphfuse.patterns", {"name": (str,)})
_ENGINES = _Kind(
    "engine",
    Engine,
    "graphfuse.engines",
    {"name": (str,), "facts": (type,), "knobs": (type, tuple), "modes": (frozenset, set), "serves": (Served,)},
)


_origins: dict[int, Origin] = {}
"""Origins of all loaded plug-ins, by id. `_installed` keeps the objects alive."""


@functools.cache
def _installed(wanted: bool, libraries: bool | None) -> Registry:
    """Registry of all plug-ins. wanted: whether to load installed ones. libraries: True if engines of libraries are
    used like others, None if they are queried last (``Registry.last``), False if they are off."""
    from graphfuse import engines, patterns

    known = {_PATTERNS: (*patterns.ALL, *_patterns_of(engines.ALL)), _ENGINES: engines.ALL}
    used = [e for e in engines.ALL if libraries is not False or e.name not in engines.LIBRARIES]
    found: dict[_Kind, list] = {_PATTERNS: list(patterns.ALL), _ENGINES: used}
    origins: dict[int, Origin] = {id(item): FIRST_PARTY for items in known.values() for item in items}
    rows: list[Listed] = []
    for kind, entry, error in _offered():
        where = _origin(entry)
        if error is None and not wanted:
            rows.append(Listed(kind.name, entry.name, where.distribution, where.version, OFF))
            continue
        for item, why in _loaded(kind, entry) if error is None else ((None, error),):
            if item is not None and any(item is known for known in found[kind]):
                continue  # offered twice
            if item is not None and why is None:
                same = next((other for other in (*found[kind], *known[kind]) if other.name == item.name), None)
                if same is not None:
                    why = f"{origins[id(same)]} has one of that name, and names must differ; {where} comes later"
            name = item.name if item is not None and kind.fault(item) is None else entry.name
            if why is None:
                found[kind].append(item)
                origins[id(item)] = where
            else:
                why = f"{kind.name} {name!r} of {where} is left out: {why}"
                warnings.warn(why, RuntimeWarning, stacklevel=4)
            state = LOADED if why is None else LEFT_OUT
            rows.append(Listed(kind.name, name, where.distribution, where.version, state, why))
    _origins.update(origins)
    last, off = (engines.LIBRARIES if libraries is setting else frozenset() for setting in (None, False))
    return Registry(tuple(found[_PATTERNS]), tuple(found[_ENGINES]), origins, tuple(rows), last, off)


def _offered() -> Iterator[tuple[_Kind, metadata.EntryPoint, str | None]]:
    """Entry points of both groups by name, and an entry with an error for each package whose list cannot be read."""
    try:
        scanned = metadata.entry_points()  # one scan of all installed packages serves both groups
        offered = [entry for kind in (_PATTERNS, _ENGINES) for entry in scanned.select(group=kind.group)]
    except Exception:
        offered = []
        for package in metadata.distributions():
            try:
                offered += package.entry_points
            except Exception as error:
                entry = metadata.EntryPoint("entry_points.txt", "", _ENGINES.group)
                vars(entry)["dist"] = package
                yield _ENGINES, entry, f"its entry points cannot be read: {error_text(error)}"
    for kind in (_PATTERNS, _ENGINES):
        group = [entry for entry in offered if entry.group == kind.group]
        for entry in sorted(group, key=lambda e: (e.name, _origin(e).distribution)):
            yield kind, entry, None


def _origin(entry: metadata.EntryPoint) -> Origin:
    package = entry.dist
    try:
        return Origin(package.name or "a package without a name", package.version or "")
    except Exception:  # its metadata cannot be read, or it is None
        return Origin("a package without metadata", "")


def _loaded(kind: _Kind, entry: metadata.EntryPoint) -> Iterator[tuple[object, str | None]]:
    """Objects that an entry point names, each with its fault or None. The object is None if it could not be loaded."""
    where = f"entry point {entry.name!r} in {kind.group} ({entry.value})"
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:
        yield None, f"{where} failed to load: {error_text(error)}"
        return
    for item in loaded if isinstance(loaded, tuple | list) else (loaded,):
        if not isinstance(item, kind.of):
            yield None, f"{where} must give {kind.of.__name__} objects, got {safe_repr(item)}"
        else:
            yield item, kind.fault(item)


def _select(kind: _Kind, registry: Registry, known: tuple, wanted: tuple, first_party: tuple = ()) -> tuple:
    """Plug-ins for a graph. wanted: objects and names that the user gave. known: those used without names. first_party:
    further ones, which are used only if named."""
    objects = tuple({id(w): w for w in wanted if isinstance(w, kind.of)}.values())
    names = [w for w in wanted if isinstance(w, str)]
    for w in wanted:
        if not isinstance(w, kind.of | str):
            raise GraphTypeError(f"{kind.name}s: give {kind.of.__name__} objects or names, got {w!r}")
        why = None if isinstance(w, str) else kind.fault(w)
        if why:
            raise PluginError(f"{kind.name} {getattr(w, 'name', w)!r}, given to the graph: {why}")
    by_name = {item.name: item for item in (*first_party, *known, *objects)}
    for name in names:
        if name not in by_name:
            missing = "; ".join(o.error for o in registry.listed if o.state == LEFT_OUT and o.name == name and o.error)
            raise GraphValidationError(
                f"no {kind.name} is named {name!r}; there are: {', '.join(by_name)}{f'; {missing}' if missing else ''}"
            )
    rest = tuple(dict.fromkeys(by_name[name] for name in names)) if names else known
    rest = tuple(item for item in rest if not any(item is o or _alike(item, o) for o in objects))
    for number, item in enumerate(objects):
        for other in (*rest, *objects[:number]):
            if item.name == other.name:
                theirs = registry.origins.get(id(other), "the graph's caller")
                raise PluginError(
                    f"two {kind.name}s are named {item.name!r}: one that the graph was given, and one of {theirs}; "
                    "names must differ"
                )
    return objects + rest


def _alike(installed: object, given: object) -> bool:
    """True if both are the same plug-in, constructed twice. First-party engines of one class differ only in caches."""
    if isinstance(installed, Pattern):
        return installed == given
    if type(installed) is not type(given):
        return False
    same = getattr(installed, "__dict__", {}) == getattr(given, "__dict__", {})
    return same or _origins.get(id(installed)) == FIRST_PARTY
