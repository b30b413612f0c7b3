"""The registry of patterns and engines: first-party ones, then installed packages', then the caller's.

A package offers its own through entry points in the groups ``graphfuse.engines`` and
``graphfuse.patterns``, each naming an Engine or Pattern object, or a tuple of them.
Nothing registers by being imported.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from graphfuse.engine import Engine
from graphfuse.errors import GraphTypeError, GraphValidationError, PluginError
from graphfuse.match import Pattern


@dataclass(frozen=True)
class Registry:
    """What planning may use, in order of preference."""

    patterns: tuple[Pattern, ...]
    engines: tuple[Engine, ...]


def registry(patterns: Iterable[object] = (), engines: Iterable[object] = ()) -> Registry:
    """The registry for one graph: objects given here come first; if names are given, only
    they (and the objects) are kept."""
    known = installed()
    return Registry(
        _select("pattern", Pattern, known.patterns, tuple(patterns)),
        _select("engine", Engine, known.engines, tuple(engines)),
    )


@functools.cache
def installed() -> Registry:
    """First-party patterns and engines, then those of installed packages by entry-point name."""
    from graphfuse import engines, patterns

    offered = metadata.entry_points()  # one scan of all installed packages serves both groups
    return Registry(
        _distinct("pattern", (*patterns.ALL, *_load(offered, "graphfuse.patterns", Pattern))),
        _distinct("engine", (*engines.ALL, *_load(offered, "graphfuse.engines", Engine))),
    )


def _load(offered: metadata.EntryPoints, group: str, kind: type) -> Iterable[object]:
    for entry in sorted(offered.select(group=group), key=lambda e: e.name):
        try:
            loaded = entry.load()
        except Exception as error:
            raise PluginError(
                f"entry point {entry.name!r} in {group} ({entry.value}) failed to load: {error}"
            ) from error
        for item in loaded if isinstance(loaded, tuple | list) else (loaded,):
            if not isinstance(item, kind):
                raise PluginError(
                    f"entry point {entry.name!r} in {group} ({entry.value}) must give {kind.__name__} objects, "
                    f"got {item!r}"
                )
            yield item


def _select(what: str, kind: type, known: tuple, wanted: tuple) -> tuple:
    objects = tuple(w for w in wanted if isinstance(w, kind))
    names = [w for w in wanted if isinstance(w, str)]
    for w in wanted:
        if not isinstance(w, kind | str):
            raise GraphTypeError(f"{what}s: give {kind.__name__} objects or names, got {w!r}")
    by_name = {item.name: item for item in known}
    for name in names:
        if name not in by_name:
            raise GraphValidationError(f"no {what} is named {name!r}; there are: {', '.join(by_name)}")
    rest = tuple(by_name[name] for name in names) if names else known
    return _distinct(what, objects + rest)


def _distinct(what: str, items: tuple) -> tuple:
    names = [item.name for item in items]
    for name in names:
        if names.count(name) > 1:
            raise PluginError(f"two {what}s are named {name!r}; names must differ")
    return items
