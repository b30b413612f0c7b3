"""One tuned choice of knobs: its problem class, its device, and its origin."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

ORIGINS = ("measured", "published", "user")
"""measured: by this project, in a table beside the engine. published: by others, and not
measured here. user: by this user, in the store."""

_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class Source:
    """Where entries come from. arch: "sm_90". date: ISO 8601, None where it is not known, as of what
    others published. versions: of the packages that took part. commit: of this project's sources,
    with "-dirty" where files were changed; None where they are an installed package or took no part."""

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
        """From JSON; ValueError says what is wrong."""
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
        return cls(_knobs(v.get("knobs")), _number("us", v.get("us")))


@dataclass(frozen=True)
class Entry:
    """The knobs of one problem class (key and rows as of ``engine.ProblemClass``).

    us: median microseconds of a launch, None if not known. others: what else was timed,
    fastest first. published: the figures that published knobs were translated from.
    """

    source: Source
    engine: str
    key: Mapping[str, object]
    rows: int
    knobs: Mapping[str, object]
    us: float | None = None
    others: tuple[Timed, ...] = ()
    published: Mapping[str, object] | None = None

    def same_class(self, other: "Entry") -> bool:
        """Whether one of the two would take the other's place in a file."""
        mine = (self.source.device, self.engine, self.rows, self.key)
        return mine == (other.source.device, other.engine, other.rows, other.key)

    def to_json(self) -> dict[str, object]:
        """All but the source, what is not known left out."""
        values = {"engine": self.engine, "key": self.key, "rows": self.rows, "knobs": self.knobs, "us": self.us}
        values |= {"others": [asdict(o) for o in self.others], "published": self.published}
        return {name: value for name, value in values.items() if value not in (None, [])}

    @classmethod
    def parse(cls, value: object, source: Source) -> "Entry":
        """From JSON; ValueError says what is wrong."""
        v = _mapping("an entry", value, cls)
        _check("engine", v.get("engine"), (str,))
        _check("key", v.get("key"), (dict,))
        _check("rows", v.get("rows"), (int,))
        _check("others", v.get("others", []), (list,))
        _check("published", v.get("published"), (dict, type(None)))
        if not 1 <= v["rows"] < 1 << 63:
            raise ValueError(f"rows is {v['rows']}; accepted: 1 to 2^63 - 1")
        return cls(
            source,
            v["engine"],
            v["key"],
            v["rows"],
            _knobs(v.get("knobs")),
            None if v.get("us") is None else _number("us", v["us"]),
            tuple(map(Timed.parse, v.get("others", []))),
            v.get("published"),
        )


def _mapping(what: str, value: object, kind: type) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}; accepted: an object")
    unknown = sorted(set(value) - {"source", *kind.__dataclass_fields__})
    if unknown:
        raise ValueError(f"{what} has {', '.join(unknown)}; accepted: {', '.join(kind.__dataclass_fields__)}")
    return value


def _check(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name} is {value!r}; accepted: {' or '.join(k.__name__ for k in kinds)}")


def _knobs(value: object) -> dict[str, object]:
    _check("knobs", value, (dict,))
    for name, knob in value.items():
        _check(f"knob {name}", knob, _SCALARS)
    return value


def _number(name: str, value: object) -> float:
    _check(name, value, (int, float))
    if not 0 < value <= sys.float_info.max:  # JSON has integers that no float holds
        raise ValueError(f"{name} is {value}; accepted: a positive number")
    return float(value)
