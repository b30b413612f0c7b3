"""Table of the order of engines for a region, by the family of its computation. Each entry has its origin.

The first entry for a family of the region decides, if it was measured on the same architecture. Engines that it does
not distinguish keep their order: first those of a pattern's facts, then those that run any nodes, each in order of
registration. The caller's engines are registered first, and so come before engines that were measured.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphfuse.base.device import Device
from graphfuse.contract.match import Region
from graphfuse.tuned_tables import measured
from graphfuse.tuned_tables.entry import Source
from graphfuse.tuned_tables.tunings import arch

ANY = "*"
"""Family that contains every region."""

OTHERS = "*"
"""Placeholder in an order for all engines that it does not name."""


@dataclass(frozen=True)
class Rank:
    """The order of engines for one family.

    family: the name of a pattern, or of an op that the region contains, or ANY. engines: names, and OTHERS once.
    source: of the measurement; None for a default, which applies to all devices. us: microseconds of each named engine,
    the geometric mean over the family's problems; empty for a default. Raises ValueError if these do not agree.
    """

    family: str
    engines: tuple[str, ...]
    source: Source | None = None
    us: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.engines.count(OTHERS) != 1 or len(set(self.engines)) < len(self.engines):
            raise ValueError(f"{self._where}: engines are {self.engines}; accepted: each name once, {OTHERS!r} once")
        named = [name for name in self.engines if name != OTHERS]
        if self.source is None:
            if self.us:
                raise ValueError(f"{self._where}: a default has no times, got {dict(self.us)}")
        elif set(named) != set(self.us) or sorted(named, key=lambda name: self.us[name]) != named:
            raise ValueError(
                f"{self._where}: engines are {named}; accepted, as measured: {dict(self.us)}, fastest first"
            )

    @property
    def _where(self) -> str:
        return f"ranking of family {self.family!r}"

    def __str__(self) -> str:
        order = ", ".join("others as registered" if name == OTHERS else name for name in self.engines)
        origin = f"measured on {self.source.device}, {self.source.date}" if self.source else "default"
        return f"{order} ({origin})"

    def places(self, engines: Sequence[str]) -> list[int]:
        """Ranks of engines that are registered in this order; smaller ones come first.

        Engines that were not measured but are registered before all that were, such as the caller's, stay first."""
        places: list[int] = []
        for name in engines:
            ahead = self.source is not None and name not in self.engines and all(place < 0 for place in places)
            places.append(-1 if ahead else self.engines.index(name if name in self.engines else OTHERS))
        return places

    def is_first_of(self, engines: Collection[str]) -> bool:
        """True if the engine that comes first is one of these."""
        return bool(engines) and self.engines[0] in (OTHERS, *engines)


LAST = "reference"
"""Name of the engine that comes after engines that were not measured."""


def entry(family: str, us: Mapping[str, float], source: Source) -> Rank:
    """Rank for measured times, fastest first."""
    names = sorted(us, key=us.__getitem__)
    unknown = len(names) - 1 if names[-1] == LAST else len(names)
    return Rank(family, (*names[:unknown], OTHERS, *names[unknown:]), source, us)


RANKING = (
    *(entry(family, us, Source.parse(measured.SOURCES[place])) for place, family, us in measured.TIMES),
    Rank(ANY, (OTHERS, LAST)),
)
"""The first-party table. Its last entry is a default for every family."""


def rank(region: Region, device: Device, table: Iterable[Rank] = RANKING) -> Rank:
    """The order of engines for a region."""
    families = {ANY, region.pattern, *(node.op.name for node in region.subgraph.nodes)}
    for entry in table:
        if entry.family in families and (entry.source is None or entry.source.arch == arch(device)):
            return entry
    return Rank(ANY, (OTHERS,))
