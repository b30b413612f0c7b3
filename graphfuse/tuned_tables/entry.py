"""One tuned choice of knobs: its problem class, its device, and its origin."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

ORIGINS = ("measured", "published", "user")
"""measured: by this project, in a table beside the engine. published: by others, and not
measured here. user: by this user, in the store."""

_SCALARS = frozenset((bool, int, float, str))


@dataclass(frozen=True)
class Source:
    """Origin of entries.

    arch: "sm_90".
    date: ISO 8601, None where it is not known, as of what others published.
    versions: of the packages that took part.
    commit: of this project's sources, with "-dirty" where files were changed; None where they are an installed package
        or took no part.
    """

    origin: str
    device: str
    arch: str
    date: str | None = None
    driver: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    commit: str | None = None

    def to_json(self) -> dict[str, object]:
        """All, but a commit that is not known."""
        values = asdict(self)
        return values if self.commit else {name: v for name, v in values.items() if name != "commit"}

    @classmethod
    def parse(cls, value: object) -> "Source":
        """Reads JSON; ValueError says what is wrong."""
        v = _mapping("a source", value, cls)
        for name in ("origin", "device", "arch"):
            _check(name, v.get(name), (str,))
        for name in ("date", "driver", "commit"):
            _check(name, v.get(name), (str, type(None)))
        _check("versions", v.get("versions", {}), (dict,))
        if v["origin"] not in ORIGINS:
            raise ValueError(f"origin is {v['origin']!r}; accepted: {', '.join(ORIGINS)}")
        return cls(**v)


@dataclass(frozen=True)
class Timed:
    """Knobs and the microseconds that a launch with them took (median)."""

    knobs: Mapping[str, object]
    us: float

    @classmethod
    def parse(cls, value: object) -> "Timed":
        v = _mapping("timed knobs", value, cls)
        _check_knobs(v.get("knobs"))
        _check_us(v.get("us"))
        return cls(**v)


@dataclass(frozen=True)
class TunedEntry:
    """The knobs of one problem class (key and rows as of ``engine.ProblemClass``).

    us: median microseconds of a launch, None if not known.
    others: what else was timed, fastest first.
    published: the figures that published knobs were translated from.
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
        """True if one of the two would take the other's place in a file."""
        mine = (self.source.device, self.engine, self.rows, self.key)
        return mine == (other.source.device, other.engine, other.rows, other.key)

    def to_json(self) -> dict[str, object]:
        """JSON of what a problem's entries differ in, but the source; what is not known is left out."""
        values = {"rows": self.rows, "knobs": self.knobs, "us": self.us}
        values |= {"others": [asdict(o) for o in self.others], "published": self.published}
        return {name: value for name, value in values.items() if value not in (None, [])}

    @classmethod
    def parse(cls, value: object, source: Source, engine: str, key: Mapping[str, object]) -> "TunedEntry":
        """Reads JSON; ValueError says what is wrong."""
        try:
            made = cls(source, engine, key, **value)
        except TypeError:
            accepted = ", ".join(name for name in cls.__dataclass_fields__ if name not in ("source", "engine", "key"))
            raise ValueError(f"an entry is {value!r:.200}; accepted: an object of {accepted}") from None
        if type(made.rows) is not int or not 1 <= made.rows < 1 << 63:
            raise ValueError(f"rows is {made.rows!r}; accepted: 1 to 2^63 - 1")
        _check_knobs(made.knobs)
        if made.us is not None:
            _check_us(made.us)
        if made.published is not None:
            _check("published", made.published, (dict,))
        if made.others:
            _check("others", made.others, (list,))
            return replace(made, others=tuple(map(Timed.parse, made.others)))
        return made


def _mapping(what: str, value: object, kind: type) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}; accepted: an object")
    unknown = sorted(value.keys() - kind.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(f"{what} has {', '.join(unknown)}; accepted: {', '.join(kind.__dataclass_fields__)}")
    return value


def _check(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name} is {value!r}; accepted: {' or '.join(k.__name__ for k in kinds)}")


def _check_knobs(value: object) -> None:
    if type(value) is not dict or not _SCALARS.issuperset(map(type, value.values())):
        accepted = " or ".join(sorted(kind.__name__ for kind in _SCALARS))
        raise ValueError(f"knobs is {value!r}; accepted: an object with values of {accepted}")


def _check_us(value: object) -> None:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # JSON has integers that no float holds
        raise ValueError(f"us is {value!r}; accepted: a positive number")
