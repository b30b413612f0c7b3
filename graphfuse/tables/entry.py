"""One tuned choice of knobs: its problem class, its device, and its origin."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

ORIGINS = ("measured", "published", "user")
"""measured: by this project, in a table beside the engine. published: by others, and not
measured here. user: by this user, in the store."""

_OF_ENTRY = dict.fromkeys(("rows", "knobs", "us", "others", "published"))
_SCALARS = frozenset((bool, int, float, str))


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
        v = _mapping("a source", value, cls.__dataclass_fields__)
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
        v = _mapping("timed knobs", value, cls.__dataclass_fields__)
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
        """What a problem's entries differ in, but the source; what is not known left out."""
        values = {"rows": self.rows, "knobs": self.knobs, "us": self.us}
        values |= {"others": [asdict(o) for o in self.others], "published": self.published}
        return {name: value for name, value in values.items() if value not in (None, [])}

    @classmethod
    def parse(cls, value: object, source: Source, engine: str, key: Mapping[str, object]) -> "Entry":
        """From JSON; ValueError says what is wrong."""
        get = _mapping("an entry", value, _OF_ENTRY).get
        rows, us, others, published = get("rows"), get("us"), get("others"), get("published")
        if type(rows) is not int or not 1 <= rows < 1 << 63:
            raise ValueError(f"rows is {rows!r}; accepted: 1 to 2^63 - 1")
        if published is not None:
            _check("published", published, (dict,))
        if others is not None:
            _check("others", others, (list,))
        timed = () if others is None else tuple(map(Timed.parse, others))
        return cls(
            source, engine, key, rows, _knobs(get("knobs")), us if us is None else _number("us", us), timed, published
        )


def _mapping(what: str, value: object, accepted: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}; accepted: an object")
    if not value.keys() <= accepted.keys():
        unknown = ", ".join(sorted(value.keys() - accepted.keys()))
        raise ValueError(f"{what} has {unknown}; accepted: {', '.join(accepted)}")
    return value


def _check(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name} is {value!r}; accepted: {' or '.join(k.__name__ for k in kinds)}")


def _knobs(value: object) -> dict[str, object]:
    if type(value) is not dict or not _SCALARS.issuperset(map(type, value.values())):
        accepted = " or ".join(sorted(kind.__name__ for kind in _SCALARS))
        raise ValueError(f"knobs is {value!r}; accepted: an object with values of {accepted}")
    return value


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # JSON has integers no float holds
        raise ValueError(f"{name} is {value!r}; accepted: a positive number")
    return float(value)
