"""One tuned choice of knobs: its problem class, its device, and its origin."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from graphfuse.files import json_values

ORIGINS = ("measured", "published", "user")
"""measured: by this project, in a table next to the engine's module. published: by others, and not measured by this
project. user: by this user, in the store."""

_SCALARS = frozenset((bool, int, float, str))
_Kinds = Mapping[str, tuple[type, ...]]
"""Accepted types of fields, by name."""
_TEXT_OR_NONE = (str, type(None))


@dataclass(frozen=True)
class Source:
    """Origin of entries.

    arch: such as "sm_90".
    date: ISO 8601; None if it is not known, as for published knobs.
    versions: of the packages that were used.
    commit: of this project's sources, with "-dirty" if files were changed; None if they are an installed package or
        were not used.
    """

    origin: str
    device: str
    arch: str
    date: str | None = None
    driver: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    commit: str | None = None

    def to_json(self) -> dict[str, object]:
        """JSON of all fields; the commit is omitted if it is None."""
        values = asdict(self)
        return values if self.commit else {name: v for name, v in values.items() if name != "commit"}

    @classmethod
    def parse(cls, value: object) -> "Source":
        """Reads JSON. Raises ValueError, which says what is wrong."""
        optional = dict.fromkeys(("date", "driver", "commit"), _TEXT_OR_NONE) | {"versions": (dict,)}
        found = _fields("a source", value, dict.fromkeys(("origin", "device", "arch"), (str,)), optional)
        if found["origin"] not in ORIGINS:
            json_values.refuse("a source: origin", found["origin"], ", ".join(ORIGINS))
        return cls(**found)


@dataclass(frozen=True)
class Timed:
    """Knobs and the microseconds that a launch with them took (median)."""

    knobs: Mapping[str, object]
    us: float

    @classmethod
    def parse(cls, value: object) -> "Timed":
        return cls(**_fields("timed knobs", value, {"knobs": (dict,), "us": (int, float)}, {}))


@dataclass(frozen=True)
class TunedEntry:
    """The knobs of one problem class (key and rows as in ``engine.ProblemClass``).

    us: median microseconds of a launch; None if not known.
    others: other knobs that were timed, fastest first.
    published: the published figures that the knobs were translated from.
    """

    source: Source
    engine: str
    key: Mapping[str, object]
    rows: int
    knobs: Mapping[str, object]
    us: float | None = None
    others: tuple[Timed, ...] = ()
    published: Mapping[str, object] | None = None

    def same_class(self, other: "TunedEntry") -> bool:
        """True if both entries are for the same problem class and device, so that a file keeps only one of them."""
        mine = (self.source.device, self.engine, self.rows, self.key)
        return mine == (other.source.device, other.engine, other.rows, other.key)

    def to_json(self) -> dict[str, object]:
        """JSON of the fields in which entries of one problem differ, without the source. Unknown ones are omitted."""
        values = {"rows": self.rows, "knobs": self.knobs, "us": self.us}
        values |= {"others": [asdict(o) for o in self.others], "published": self.published}
        return {name: value for name, value in values.items() if value not in (None, [])}

    @classmethod
    def parse(cls, value: object, source: Source, engine: str, key: Mapping[str, object]) -> "TunedEntry":
        """Reads JSON. Raises ValueError, which says what is wrong."""
        optional = {"us": (int, float, type(None)), "others": (list,), "published": (dict, type(None))}
        found = _fields("an entry", value, {"rows": (int,), "knobs": (dict,)}, optional)
        if not 1 <= found["rows"] < 1 << 63:
            json_values.refuse("an entry: rows", found["rows"], "1 to 2^63 - 1")
        found["others"] = tuple(map(Timed.parse, found.get("others", ())))
        return cls(source, engine, key, **found)


def _fields(where: str, value: object, required: _Kinds, optional: _Kinds) -> dict[str, object]:
    """The fields of a JSON object, which must have no others. Values of knobs and microseconds are checked, too."""
    found = {name: json_values.field(where, value, name, *kinds) for name, kinds in required.items()}
    found |= {name: json_values.field(where, value, name, *of) for name, of in optional.items() if name in value}
    json_values.known(f"{where}: a field", [*value], [*required, *optional])
    knobs, us = found.get("knobs", {}), found.get("us")
    if not _SCALARS.issuperset(map(type, knobs.values())):
        accepted = " or ".join(sorted(kind.__name__ for kind in _SCALARS))
        json_values.refuse(f"{where}: knobs", knobs, f"an object with values of {accepted}")
    if us is not None and not 0 < us <= sys.float_info.max:  # JSON has integers that no float holds
        json_values.refuse(f"{where}: us", us, "a positive number")
    return found
